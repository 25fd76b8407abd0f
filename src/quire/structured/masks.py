"""The masks of a step: every row's in one array, grammars of one kind filled together, by several cores.

Called by the core's pipeline while the device computes the step's forward pass. Knows guides and matchers, not requests.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from quire.step import Masks
from quire.structured.base import SLOW_FILL_S
from quire.structured.guide import CONTRADICTION, Guide

NUM_THREADS = max(1, min(2, (os.cpu_count() or 1) - 1))  # beside the one that asks
MIN_PART = 16  # rows a thread takes, at least
MAX_SEEN = 32  # tokens taken in by one call: if it fails, so many requests do

Buffer = bytearray | memoryview


class Ahead(NamedTuple):
    """Rows whose masks are being made already, the first of the array."""

    words: np.ndarray
    places: list[int]
    parts: list[Future[float]]  # seconds that each took


class Masker:
    def __init__(self, num_words: int, memory: Callable[[int, int], Buffer | None] = lambda num_rows, num_words: None) -> None:
        """`memory(num_rows, num_words)` gives an array of int32 from which masks reach the device fastest; None: any will do."""
        self.num_words = num_words  # of a mask
        self.memory = memory
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="masks")
        self.one_by_one = False  # so that whoever is slow is found out
        self.own = np.empty((0, num_words), np.int32)  # used again in every step: the executor copies what it is given

    def begin(self, tokens: Sequence[tuple[int, Guide, int]], num_rows: int) -> Ahead | None:
        """Guides see their next token, and other threads begin to make the masks after it, for these places of a step that chooses
        for `num_rows` rows. `Guide.advance` will hear of the token once more, from the scheduler, and knows that it is old."""
        able = [each for each in tokens if each[1].can_see(each[2])]
        if not able or self.one_by_one:
            self.one_by_one = False
            return None
        words = self._words(num_rows)
        by_kind = defaultdict(list)
        for row, (_, guide, token_id) in enumerate(able):
            guide.is_ahead = True
            by_kind[type(guide.matcher)].append((guide, token_id, row))
        started = time.perf_counter()
        for rows in by_kind.values():
            for at in range(0, len(rows), MAX_SEEN):
                _see(rows[at : at + MAX_SEEN])
        self.one_by_one = time.perf_counter() - started > SLOW_FILL_S
        size = max(MIN_PART, -(-len(able) // NUM_THREADS))
        parts = [rows[at : at + size] for rows in by_kind.values() for at in range(0, len(rows), size)]
        begun = threading.Semaphore(0)
        futures = [self.threads.submit(_fill, part, words, begun) for part in parts]
        for _ in parts[:NUM_THREADS]:  # a thread that has not begun would wait for Python's lock until this one rests
            begun.acquire()
        return Ahead(words, [place for place, _, _ in able], futures)

    def masks(self, wanted: Sequence[tuple[int, Guide]], ahead: Ahead | None = None) -> Masks | None:
        """Of the choosing rows at these places of the step; None where all of them are free."""
        done = set(ahead.places) if ahead is not None else ()
        rest = [(place, guide) for place, guide in wanted if place not in done and not guide.is_free]
        words = ahead.words if ahead is not None else self._words(len(rest))
        for row, (_, guide) in enumerate(rest, len(done)):
            guide.fill(words[row])
        if ahead is not None:
            self.one_by_one |= max(part.result() for part in ahead.parts) > SLOW_FILL_S
        places = [*(ahead.places if ahead is not None else ()), *(place for place, _ in rest)]
        return Masks(places, words[: len(places)].data.cast("B")) if places else None

    def _words(self, num_rows: int) -> np.ndarray:
        memory = self.memory(num_rows, self.num_words)
        if memory is not None:
            return np.frombuffer(memory, np.int32).reshape(num_rows, self.num_words)
        if num_rows > len(self.own):
            self.own = np.empty((2 * num_rows, self.num_words), np.int32)
        return self.own[:num_rows]

    def close(self) -> None:
        self.threads.shutdown(wait=False)


def _see(rows: list[tuple[Guide, int, int]]) -> None:
    """Matchers of one kind take their tokens."""
    guides, token_ids, _ = zip(*rows)
    matchers = [guide.matcher for guide in guides]
    try:
        refused = type(matchers[0]).accept_all(matchers, token_ids)
    except Exception:  # one of them, and nobody knows what the others have seen
        for guide in guides:
            guide.fail()
        return
    for idx in refused:
        guides[idx].problem = CONTRADICTION


def _fill(rows: list[tuple[Guide, int, int]], words: np.ndarray, begun: threading.Semaphore) -> float:
    """In a thread: the masks of matchers of one kind. Engines let go of Python's lock."""
    started = time.perf_counter()
    matchers, places = [guide.matcher for guide, _, _ in rows], [row for _, _, row in rows]
    begun.release()
    try:
        type(matchers[0]).fill_all(matchers, words, places)
    except Exception:  # whose fault it is shows one by one
        for guide, _, row in rows:
            guide.fill(words[row])
    return time.perf_counter() - started
