"""Requests as somebody who watches sees them: random ids, phases, progress, and what happened to each when.

Made by `view.py` with the first watcher, which tells it of steps. A request is noted when a step computes part of its
prompt or when it is first shown. Must not show its tokens, nor the id that clients know it by.
"""

import itertools
import secrets
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from quire.core.request import Request, Status

MAX_RUNNING = 64
MAX_WAITING = 16
MAX_ENDED = 8
MAX_ENTRIES = 16  # of a timeline
COLUMNS = (
    "id", "phase", "prompt", "cached", "computed", "output", "max_output", "blocks", "preemptions", "arrived_s",
    "timeline",
)  # fmt: skip


class TimelineEntry(NamedTuple):
    kind: str
    start_s: float
    end_s: float
    num_tokens: int | None = None  # computed or generated

    def as_json(self) -> str:
        tokens = "" if self.num_tokens is None else f",{self.num_tokens}"
        return f'["{self.kind}",{self.start_s:.3f},{self.end_s:.3f}{tokens}]'


class Track:
    """What is noted of a request. `kind`: of the timeline's last entry, if that goes on: "queue", "decode" or ""."""

    __slots__ = (
        "request", "id", "number", "num_preemptions", "entries", "kind", "since", "seen", "is_deferred",
        "_arrived_s", "_shown_as", "_head", "_middle", "_tail",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, arrived_s: float, num_groups: int) -> None:
        self.request = request
        self.id = secrets.token_hex(4)
        self.number = number  # by which the map of blocks knows it
        self.num_preemptions = request.num_preemptions
        self.entries: list[TimelineEntry] = []  # those that are over
        self.kind = "queue"
        self.since = arrived_s
        self.seen = [0] * num_groups  # entries of its block tables that the map knows
        self.is_deferred = False  # its grammar is being compiled
        self._arrived_s = f"{arrived_s:.3f}"
        # What of its row stays the same until something happens to it, and the phase and number of entries it is for.
        self._shown_as = ("", 0)
        self._head = self._middle = self._tail = ""

    # -- what happens to it --------------------------------------------------------------------------------------

    def computed_prompt(self, began_s: float, now_s: float, num_tokens: int) -> None:
        """A step that began then computed part of what the request had when it got its row."""
        self._close(began_s)
        self._append(TimelineEntry("prefill", began_s, now_s, num_tokens))
        self._begin_decode(now_s)

    def admitted(self, at_s: float, now_s: float) -> None:
        """It left the line, and no step has told of it since it was last looked at."""
        self._close(max(self.since, at_s))
        self._begin_decode(now_s)

    def preempted(self, now_s: float) -> None:
        self.num_preemptions = self.request.num_preemptions
        self._close(now_s)
        self._append(TimelineEntry("preempt", now_s, now_s))
        self._open("queue", now_s)
        self.seen = [0] * len(self.seen)

    def ended(self, now_s: float) -> None:
        self._close(now_s)
        self._append(TimelineEntry("end", now_s, now_s))

    def _begin_decode(self, now_s: float) -> None:
        if len(self.request.token_ids) > self.request.num_row_start:
            self._open("decode", now_s)

    def _open(self, kind: str, now_s: float) -> None:
        self.kind, self.since = kind, now_s
        self._changed()

    def _close(self, now_s: float) -> None:
        if self.kind:
            request = self.request
            num_tokens = len(request.token_ids) - request.num_row_start if self.kind == "decode" else None
            self._append(TimelineEntry(self.kind, self.since, now_s, num_tokens))
            self.kind = ""

    def _changed(self) -> None:
        self._shown_as = ("", 0)

    def _append(self, entry: TimelineEntry) -> None:
        self._changed()
        entries = self.entries
        entries.append(entry)
        if len(entries) < MAX_ENTRIES:
            return
        for idx, (first, second) in enumerate(itertools.pairwise(entries)):
            if first.kind == second.kind == "prefill":
                num_tokens = (first.num_tokens or 0) + (second.num_tokens or 0)
                entries[idx : idx + 2] = [TimelineEntry("prefill", first.start_s, second.end_s, num_tokens)]
                return
        del entries[1]

    # -- how it is shown -----------------------------------------------------------------------------------------

    def row(self, phase: str, num_blocks: int, now: str, max_entries: int) -> str:
        """Its row of the table as JSON. Put together here: there are many, and most of each stays the same."""
        if self._shown_as != (phase, max_entries):
            self._shown_as = (phase, max_entries)
            self._write_constant(phase, max_entries)
        request = self.request
        num_known = len(request.token_ids)
        end = ""
        if self.kind:
            end = f"{now},{num_known - request.num_row_start}]" if self.kind == "decode" else f"{now}]"
        num_output = num_known - request.num_prompt_tokens
        return f"{self._head}{request.num_computed},{num_output}{self._middle}{num_blocks}{self._tail}{end}]]"

    def _write_constant(self, phase: str, max_entries: int) -> None:
        request, kind = self.request, self.kind
        self._head = f'["{self.id}","{phase}",{request.num_prompt_tokens},{request.num_cached_tokens},'
        self._middle = f",{request.max_total_tokens - request.num_prompt_tokens},"
        num_over = min(len(self.entries), max_entries - bool(kind))
        entries = [entry.as_json() for entry in self.entries[len(self.entries) - num_over :]]
        if kind:
            entries.append(f'["{kind}",{self.since:.3f},')  # where it ends is written with each row
        self._tail = f",{request.num_preemptions},{self._arrived_s},[{','.join(entries)}"


class Tracks:
    def __init__(self, origin: float, num_groups: int) -> None:
        """`origin`: what times count from, by time.monotonic()."""
        self.origin = origin
        self.num_groups = num_groups
        self.live: dict[Request, Track] = {}
        self.ended: deque[Track] = deque(maxlen=MAX_ENDED)  # the newest first
        self._numbers = itertools.count(1)

    def of(self, request: Request) -> Track:
        track = self.live.get(request)
        if track is None:
            arrived_s = request.arrival - self.origin
            track = self.live[request] = Track(request, next(self._numbers), arrived_s, self.num_groups)
        return track

    def running(self, request: Request, now_s: float) -> Track:
        track = self.of(request)
        if track.kind == "queue":
            is_first = request.num_preemptions == 0
            track.admitted(request.arrival - self.origin + request.queue_s if is_first else now_s, now_s)
        return track

    def deferred(self, request: Request) -> Track:
        track = self.of(request)
        track.is_deferred = True
        return track

    def find_preempted(self, now_s: float) -> None:
        for request, track in self.live.items():
            if request.num_preemptions != track.num_preemptions:
                track.preempted(now_s)

    def find_ended(self, now_s: float) -> None:
        for track in [track for request, track in self.live.items() if request.status is Status.FINISHED]:
            track.ended(now_s)
            del self.live[track.request]
            self.ended.appendleft(track)

    def forget_refused(self, deferred: Iterable[Request], known: dict[tuple[str, int], Request]) -> None:
        """Those whose grammar is no longer awaited, and that did not join the line."""
        still = set(deferred)
        for track in [track for track in self.live.values() if track.is_deferred and track.request not in still]:
            request = track.request
            if known.get((request.request_id, request.choice_idx)) is request:
                track.is_deferred = False
            else:
                del self.live[request]


def running_phase(request: Request) -> str:
    return "decode" if len(request.token_ids) > request.num_row_start else "prefill"


def waiting_phase(request: Request) -> str:
    if request.status is Status.PARKED:
        return "parked"
    return "preempted" if request.num_preemptions else "queued"
