"""The masks of a step: every row's in one array, grammars of one kind filled together, by several cores.

Called by the core's pipeline while the device computes the step's forward pass. Knows guides and matchers, not requests.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from quire.step import Masks
from quire.structured.base import SLOW_FILL_S, Matcher
from quire.structured.guide import ALL, CONTRADICTION, Guide

PART = 32  # rows a thread takes at a time
NUM_THREADS = min(8, os.cpu_count() or 1)

Buffer = bytearray | memoryview


class Ahead(NamedTuple):
    """Rows whose masks are made already, the first of the array."""

    words: np.ndarray
    places: list[int]


class Masker:
    def __init__(self, num_words: int, memory: Callable[[int, int], Buffer | None] = lambda num_rows, num_words: None) -> None:
        """`memory(num_rows, num_words)` gives an array of int32 from which masks reach the device fastest; None: any will do."""
        self.num_words = num_words  # of a mask
        self.memory = memory
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="masks")
        self.one_by_one = False  # so that whoever is slow is found out
        self.own = np.empty((0, num_words), np.int32)  # used again in every step: the executor copies what it is given

    def begin(self, tokens: Sequence[tuple[int, Guide, int]], num_rows: int) -> Ahead | None:
        """Guides see their next token, on all cores, and the masks after it are made, at these places of a step that chooses for
        `num_rows` rows. `Guide.advance` will hear of the token once more, from the scheduler, and knows that it is old."""
        able = [each for each in tokens if each[1].can_see(each[2])]
        if not able or self.one_by_one:
            self.one_by_one = False
            return None
        words = self._words(num_rows)
        by_kind = defaultdict(list)
        for row, (_, guide, token_id) in enumerate(able):
            guide.is_ahead = True
            by_kind[type(guide.matcher)].append((guide, token_id, row))
        parts = [(kind, rows[at : at + PART]) for kind, rows in by_kind.items() for at in range(0, len(rows), PART)]
        started = time.perf_counter()
        list(self.threads.map(lambda part: _see(*part, words), parts))  # engines let go of Python's lock
        self.one_by_one = time.perf_counter() - started > SLOW_FILL_S
        return Ahead(words, [place for place, _, _ in able])

    def masks(self, wanted: Sequence[tuple[int, Guide]], ahead: Ahead | None = None) -> Masks | None:
        """Of the choosing rows at these places of the step; None where all of them are free."""
        done = set(ahead.places) if ahead is not None else ()
        rest = [(place, guide) for place, guide in wanted if place not in done and not guide.is_free]
        words = ahead.words if ahead is not None else self._words(len(rest))
        for row, (_, guide) in enumerate(rest, len(done)):
            guide.fill(words[row])
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


def _see(kind: type[Matcher], rows: list[tuple[Guide, int, int]], words: np.ndarray) -> None:
    """In a thread: the guides' matchers take their tokens, and their masks are filled."""
    matchers = [guide.matcher for guide, _, _ in rows]
    try:
        seen = kind.accept_all(matchers, [token_id for _, token_id, _ in rows])
    except Exception:  # one of them, and nobody knows what the others have seen
        for guide, _, row in rows:
            guide.fail()
            words[row] = ALL
        return
    for (guide, _, _), accepted in zip(rows, seen):
        guide.problem = "" if accepted else CONTRADICTION
    try:
        kind.fill_all(matchers, words, [row for _, _, row in rows])
    except Exception:  # whose fault it is shows one by one
        for guide, _, row in rows:
            guide.fill(words[row])
