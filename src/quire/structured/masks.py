"""The masks of a step: every row's in one array, grammars of one kind filled together, by several cores.

Called by the core's pipeline while the device computes the step's forward pass. Knows guides and matchers, not requests.
"""

import time
from collections import defaultdict

import numpy as np

from quire.step import Masks
from quire.structured.base import SLOW_FILL_S
from quire.structured.guide import Guide


class Masker:
    def __init__(self, num_words: int) -> None:
        self.num_words = num_words  # of a mask
        self.one_by_one = False  # so that whoever is slow is found out
        self.words = np.empty((0, num_words), np.int32)  # used again in every step: the executor copies what it is given

    def masks(self, wanted: list[tuple[int, Guide]]) -> Masks | None:
        """Of the choosing rows at these places of the step; None where all of them are free."""
        bound = [(place, guide) for place, guide in wanted if not guide.is_free]
        if not bound:
            return None
        if len(bound) > len(self.words):
            self.words = np.empty((2 * len(bound), self.num_words), np.int32)
        words = self.words[: len(bound)]
        together = defaultdict(list)
        for row, (_, guide) in enumerate(bound):
            if guide.is_ruled and not self.one_by_one:
                together[type(guide.matcher)].append((guide.matcher, row))
            else:
                guide.fill(words[row])
        started = time.perf_counter()
        for kind, pairs in together.items():
            matchers, rows = zip(*pairs)
            kind.fill_all(matchers, words, rows)
        self.one_by_one = time.perf_counter() - started > SLOW_FILL_S
        return Masks([place for place, _ in bound], words.data.cast("B"))
