"""The masks of a step: every row's in one array, those of one grammar filled together, by several cores.

Called by the core's pipeline while the device computes the step's forward pass. Knows guides and matchers, not requests.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.step import Masks
from quire.structured.engines.base import SLOW_S
from quire.structured.running import bounded
from quire.structured.running.bounded import Job
from quire.structured.running.guide import ALL, CONTRADICTION, Guide

NUM_THREADS = max(1, min(2, (os.cpu_count() or 1) - 1))  # beside the one that asks
MIN_PART = 16  # rows a thread takes, at least
MAX_SEEN = 32  # tokens taken in by one call: if it fails, so many requests do

Buffer = bytearray | memoryview


class Row(NamedTuple):
    guide: Guide
    token_id: int
    idx: int  # of its mask


class Filling(NamedTuple):
    """What one thread is at: calls for rows of one grammar each, so that whoever takes too long hurts only itself."""

    job: Job
    parts: list[list[Row]]


class Ahead(NamedTuple):
    """Rows whose masks are being made already, the first of the array."""

    words: np.ndarray
    places: list[int]
    threads: list[Filling]


class Masker:
    def __init__(self, num_words: int, memory: Callable[[int, int, bool], Buffer | None] = lambda *asked: None) -> None:
        """`memory(num_rows, num_words, is_new)` gives an array of int32 from which masks reach the device fastest, None where any
        will do; `is_new`: one that was never given before."""
        self.num_words = num_words  # of a mask
        self.memory = memory
        self.one_by_one = False  # so that whoever is slow is found out
        self.own = np.empty((0, num_words), np.int32)  # used again in every step: the executor copies what it is given
        self.is_tainted = False  # a call that was left alone may still write to what was used so far

    def begin(self, tokens: Sequence[tuple[int, Guide, int]], num_rows: int) -> Ahead | None:
        """Guides see their next token, and other threads begin to make the masks after it, for these places of a step that chooses
        for `num_rows` rows. `Guide.advance` will hear of the token once more, from the scheduler, and knows that it is old."""
        able = [each for each in tokens if each[1].can_see(each[2])]
        if not able or self.one_by_one:
            self.one_by_one = False
            return None
        words = self._words(num_rows)
        by_grammar = defaultdict(list)
        for idx, (_, guide, token_id) in enumerate(able):
            guide.is_ahead = True
            by_grammar[type(guide.matcher), guide.matcher.grammar].append(Row(guide, token_id, idx))
        started = time.perf_counter()
        self._see([rows[at : at + MAX_SEEN] for rows in by_grammar.values() for at in range(0, len(rows), MAX_SEEN)])
        self.one_by_one = time.perf_counter() - started > SLOW_S
        size = max(MIN_PART, -(-len(able) // NUM_THREADS))
        shares: list[list[list[Row]]] = [[]]
        for rows in by_grammar.values():
            for at in range(0, len(rows), size):
                if sum(map(len, shares[-1])) >= size:
                    shares.append([])
                shares[-1].append(rows[at : at + size])
        threads = [Filling(Job([partial(_fill, part, words) for part in parts]), parts) for parts in shares]
        for filling in threads[:NUM_THREADS]:
            filling.job.wait_begun()
        return Ahead(words, [place for place, _, _ in able], threads)

    def masks(self, guided: Sequence[tuple[int, Guide]], ahead: Ahead | None = None) -> Masks | None:
        """Of the choosing rows at these places of the step; None where all of them are free."""
        done = ahead.places if ahead is not None else []
        known = set(done)
        rest = [(place, guide) for place, guide in guided if place not in known and not guide.is_free]
        places = [*done, *(place for place, _ in rest)]
        if not places:
            return None
        words = ahead.words if ahead is not None else self._words(len(places))
        if rest:
            rows = [Row(guide, -1, idx) for idx, (_, guide) in enumerate(rest, len(done))]
            job = Job([partial(row.guide.fill, words[row.idx]) for row in rows])
            self._finish(Filling(job, [[row] for row in rows]), words)
        for filling in ahead.threads if ahead is not None else ():
            self._finish(filling, words)
            self.one_by_one |= filling.job.seconds > SLOW_S
        return Masks(places, words[: len(places)].data.cast("B"))

    def _see(self, parts: list[list[Row]]) -> None:
        """Matchers take their tokens."""
        for stuck in Job([partial(_see, part) for part in parts]).wait():
            for row in parts[stuck]:
                row.guide.give_up()

    def _finish(self, filling: Filling, words: np.ndarray) -> None:
        for stuck in filling.job.wait():
            for row in filling.parts[stuck]:
                row.guide.give_up()
                words[row.idx] = ALL
            self.is_tainted = True

    def _words(self, num_rows: int) -> np.ndarray:
        """What one step's masks are written to."""
        is_new, self.is_tainted = self.is_tainted, False
        memory = self.memory(num_rows, self.num_words, is_new)
        if memory is not None:
            return np.frombuffer(memory, np.int32).reshape(num_rows, self.num_words)
        if is_new or num_rows > len(self.own):
            self.own = np.empty((2 * num_rows, self.num_words), np.int32)
        return self.own[:num_rows]

    def close(self) -> None:
        bounded.close()


def _see(rows: list[Row]) -> None:
    """In a thread: matchers of one grammar take their tokens."""
    matchers = [row.guide.matcher for row in rows]
    try:
        refused = type(matchers[0]).accept_all(matchers, [row.token_id for row in rows])
    except Exception:  # one of them, and nobody knows what the others have seen
        for row in rows:
            row.guide.fail()
        return
    for idx in refused:
        rows[idx].guide.problem = CONTRADICTION


def _fill(rows: list[Row], words: np.ndarray) -> None:
    """In a thread: the masks of matchers of one grammar. Engines let go of Python's lock."""
    sound = [row for row in rows if not row.guide.problem]
    for row in rows:
        if row.guide.problem:
            words[row.idx] = ALL
    if not sound:
        return
    matchers = [row.guide.matcher for row in sound]
    try:
        type(matchers[0]).fill_all(matchers, words, [row.idx for row in sound])
    except Exception:  # whose fault it is shows one by one
        for row in sound:
            row.guide.fill(words[row.idx])
