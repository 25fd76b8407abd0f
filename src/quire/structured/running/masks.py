"""The masks of a step: all rows' in one array, those of one grammar filled by one call, several calls at a time.

Called by the core's pipeline while the device computes the step's forward pass. Knows guides and matchers, not
requests.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.step import Masks
from quire.structured.engines.base import SLOW_S, Grammar, Matcher
from quire.structured.running import bounded
from quire.structured.running.bounded import Job
from quire.structured.running.guide import ALL, CONTRADICTION, Guide

NUM_THREADS = max(1, min(2, (os.cpu_count() or 1) - 1))  # beside the one that calls
MIN_PART = 16  # a thread takes at least so many rows
MAX_SEEN = 32  # tokens accepted by one call: if it fails, that many requests fail

Buffer = bytearray | memoryview


class Row(NamedTuple):
    """A request whose mask is row `idx` of the array."""

    guide: Guide
    idx: int


class RuledRow(NamedTuple):
    """A row that only its grammar decides, with the token its matcher sees next."""

    guide: Guide
    idx: int
    matcher: Matcher
    token_id: int


class Filling(NamedTuple):
    """The work of one thread: each part is a call for rows of one grammar, so that a slow grammar fails alone."""

    job: Job
    parts: Sequence[Sequence[Row | RuledRow]]


class Ahead(NamedTuple):
    """Masks that are being made ahead of the others: the first rows of the array."""

    words: np.ndarray
    places: list[int]  # of the rows in the step
    threads: list[Filling]


class Masker:
    def __init__(self, num_words: int, memory: Callable[[int, int, bool], Buffer | None] = lambda *asked: None) -> None:
        """`memory(num_rows, num_words, is_new)` gives an array of int32 from which masks reach the device fastest.

        It gives None where any memory will do; `is_new`: the array must not have been given before.
        """
        self.num_words = num_words  # of a mask
        self.memory = memory
        self.one_by_one = False  # the next masks are made one by one, which shows whose grammar is slow
        self.own = np.empty((0, num_words), np.int32)  # used again in every step: the executor copies what it is given
        self.is_tainted = False  # an abandoned call may still write to the array used so far

    def begin(self, tokens: Sequence[tuple[int, Guide, int]], num_rows: int) -> Ahead | None:
        """Guides see their next token, and other threads begin to make the masks after it.

        For rows at some places of a step that chooses for `num_rows` rows: (place, guide, token). The scheduler calls
        `Guide.advance` with the same token later, which does not take it a second time.
        """
        if self.one_by_one:
            self.one_by_one = False
            return None
        places: list[int] = []
        by_grammar: dict[tuple[type[Matcher], Grammar | None], list[RuledRow]] = defaultdict(list)
        for place, guide, token_id in tokens:
            matcher = guide.matcher
            if matcher is not None and guide.can_see(token_id):
                guide.is_ahead = True
                by_grammar[type(matcher), matcher.grammar].append(RuledRow(guide, len(places), matcher, token_id))
                places.append(place)
        if not places:
            return None
        words = self._words(num_rows)
        started = time.perf_counter()
        self._accept([part for rows in by_grammar.values() for part in _split(rows, MAX_SEEN)])
        self.one_by_one = time.perf_counter() - started > SLOW_S
        size = max(MIN_PART, -(-len(places) // NUM_THREADS))
        shares: list[list[list[RuledRow]]] = [[]]  # the parts of each thread
        for rows in by_grammar.values():
            for part in _split(rows, size):
                if sum(map(len, shares[-1])) >= size:
                    shares.append([])
                shares[-1].append(part)
        threads: list[Filling] = []
        for parts in shares:
            job = Job([partial(_fill, part, words) for part in parts])
            threads.append(Filling(job, parts))
        for filling in threads[:NUM_THREADS]:
            filling.job.wait_begun()
        return Ahead(words, places, threads)

    def masks(self, guided: Sequence[tuple[int, Guide, Sequence[int]]], ahead: Ahead | None = None) -> Masks | None:
        """The masks of rows of a step: (place, guide, drafts), with a place for each draft behind the row's own.

        None if any token may come next in all of them.
        """
        begun = ahead.places if ahead is not None else []
        known = set(begun)
        rest = [row for row in guided if row[0] not in known and not row[1].is_free(len(row[2]))]
        places = list(begun)
        calls = []
        parts: list[list[Row]] = []
        for place, guide, drafts in rest:
            rows = range(len(places), len(places) + 1 + len(drafts))
            calls.append((guide, slice(rows.start, rows.stop), drafts))
            parts.append([Row(guide, idx) for idx in rows])
            places += range(place, place + len(rows))
        if not places:
            return None
        words = ahead.words if ahead is not None else self._words(len(places))
        if calls:
            job = Job([partial(guide.fill_each, words[rows], drafts) for guide, rows, drafts in calls])
            self._finish(Filling(job, parts), words)
        for filling in ahead.threads if ahead is not None else ():
            self._finish(filling, words)
            self.one_by_one |= filling.job.seconds > SLOW_S
        return Masks(places, words[: len(places)].data.cast("B"))

    def _accept(self, parts: list[list[RuledRow]]) -> None:
        """Matchers accept their tokens."""
        for stuck in Job([partial(_accept, part) for part in parts]).wait():
            for row in parts[stuck]:
                row.guide.give_up()

    def _finish(self, filling: Filling, words: np.ndarray) -> None:
        for stuck in filling.job.wait():
            for row in filling.parts[stuck]:
                row.guide.give_up()
                words[row.idx] = ALL
            self.is_tainted = True

    def _words(self, num_rows: int) -> np.ndarray:
        """The array for one step's masks."""
        is_new = self.is_tainted
        self.is_tainted = False
        memory = self.memory(num_rows, self.num_words, is_new)
        if memory is not None:
            return np.frombuffer(memory, np.int32).reshape(num_rows, self.num_words)
        if is_new or num_rows > len(self.own):
            self.own = np.empty((2 * num_rows, self.num_words), np.int32)
        return self.own[:num_rows]

    def close(self) -> None:
        bounded.close()


def _split(rows: list[RuledRow], size: int) -> list[list[RuledRow]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _accept(rows: list[RuledRow]) -> None:
    """In a thread: matchers of one grammar accept their tokens."""
    matchers = [row.matcher for row in rows]
    try:
        refused = type(matchers[0]).accept_all(matchers, [row.token_id for row in rows])
    except Exception:  # of one matcher, but it is not known which of the others have accepted theirs
        for row in rows:
            row.guide.fail()
        return
    for idx in refused:
        rows[idx].guide.problem = CONTRADICTION


def _fill(rows: list[RuledRow], words: np.ndarray) -> None:
    """In a thread: the masks of matchers of one grammar. Engines release Python's lock meanwhile."""
    sound = [row for row in rows if not row.guide.problem]
    for row in rows:
        if row.guide.problem:
            words[row.idx] = ALL
    if not sound:
        return
    matchers = [row.matcher for row in sound]
    try:
        type(matchers[0]).fill_all(matchers, words, [row.idx for row in sound])
    except Exception:  # one by one, so that only the request fails whose matcher raises it
        for row in sound:
            row.guide.fill(words[row.idx])
