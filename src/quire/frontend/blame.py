"""Finds the request that makes the core crash: after each death it decides which requests may run next.

Asked by the supervisor. A core killed from outside, or one that stalled once, makes nobody a suspect. When the core
crashed by itself, the requests of the step under way are suspects; so are those in the steps of two stalls that got no
token in between. Suspects run with no other requests on the core: first in halves, then alone. A group is cleared when
each of its members has got a token. Only a request that ran alone when the core crashed again is guilty. Pure: no
clock, no process.
"""

import enum
from collections import deque
from collections.abc import Collection, Iterable

MAX_DEATHS = 8  # in a row, without a token between them and without a guilty request
MAX_GUILTY = 64  # requests found guilty in a row, without a token between them: then it is not the requests


class Cause(enum.Enum):
    OUTSIDE = "was killed"  # from outside, or fell before it took a request
    STALL = "stood still"
    OWN = "fell by itself"


class Blame:
    def __init__(self) -> None:
        self.groups: deque[set[str]] = deque()  # suspects to be tried; the first group is on trial: only it runs
        self.waiting: set[str] = set()  # of the group on trial: those without a token yet
        self.num_deaths = 0  # since the last token or guilty request
        self.num_guilty = 0  # since the last token
        self.stalled: set[str] = set()  # in the step of a stall, and without a token since

    @property
    def watches(self) -> bool:
        """Whether it matters who gets a token."""
        return bool(self.num_deaths or self.num_guilty or self.groups or self.stalled)

    @property
    def hopeless(self) -> bool:
        return self.num_deaths >= MAX_DEATHS or self.num_guilty >= MAX_GUILTY

    def may_run(self, request_id: str) -> bool:
        return not self.groups or request_id in self.groups[0]

    def died(self, cause: Cause, in_flight: Iterable[str], live: Collection[str]) -> str | None:
        """Takes a death in; the id of the request that caused it, if that is proven now.

        `in_flight`: the requests of the step under way, as far as known; `live`: all that were not finished.
        """
        self.num_deaths += 1
        suspects = {request_id for request_id in in_flight if request_id in live} or set(live)
        if cause is Cause.STALL and not self.groups:  # during a trial, a stall tells as much as a crash
            stalled_again = suspects & self.stalled
            self.stalled |= suspects
            suspects = stalled_again
        if cause is Cause.OUTSIDE or not suspects:
            self._begin_trial()
            return None
        guilty = None
        if self.groups:
            on_trial = self.groups.popleft()
            suspects = (on_trial & suspects) or on_trial
            guilty = next(iter(on_trial)) if len(on_trial) == 1 else None
        if guilty is None:
            self.groups.extend(_halves(suspects))
        else:
            self.num_deaths = 0  # explained
            self.num_guilty += 1
        self._begin_trial()
        return guilty

    def progressed(self, request_id: str) -> bool:
        """A request got a token; True when others may run now who could not before."""
        self.num_deaths = self.num_guilty = 0
        self.stalled.discard(request_id)
        return self.is_gone(request_id)

    def is_gone(self, request_id: str) -> bool:
        """As `progressed`, for a request that is no longer there."""
        if not self.groups or request_id not in self.waiting:
            return False
        self.waiting.discard(request_id)
        if self.waiting:
            return False
        self.groups.popleft()
        self._begin_trial()
        return True

    def forget(self, request_id: str) -> bool:
        """The request is gone for good: it is no suspect any more. True as for `progressed`."""
        self.stalled.discard(request_id)
        for group in list(self.groups)[1:]:
            group.discard(request_id)
        return self.is_gone(request_id)

    def _begin_trial(self) -> None:
        while self.groups and not self.groups[0]:
            self.groups.popleft()
        self.waiting = set(self.groups[0]) if self.groups else set()


def _halves(suspects: set[str]) -> list[set[str]]:
    ordered = sorted(suspects)
    middle = (len(ordered) + 1) // 2
    return [set(half) for half in (ordered[:middle], ordered[middle:]) if half]
