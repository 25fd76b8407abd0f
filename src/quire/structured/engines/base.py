"""What every grammar engine offers: it is made for a vocabulary, compiles grammars, and each request gets a matcher.

The core holds matchers and calls them between steps; the engines are files of their own. Once a grammar is compiled,
a matcher's methods are the only calls into a library: the trial makes each of them first, and none has an output
that a grammar can make long. Must not know requests or text: tokens are ids, and masks are rows of int32 words, 32
tokens each, lowest bit first.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy

from quire.messages import Vocabulary
from quire.structured.spec import GrammarSpec

SLOW_S = 0.1  # a call that takes longer is slow
MAX_SLOW = 3  # after so many slow calls a matcher is too slow
MAX_FORCED = 64


class Matcher(ABC):
    """Where one output stands in its grammar."""

    grammar: "Grammar | None" = None  # whose matcher it is
    _matcher: Any  # the library's own matcher, where there is a library

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_slow = 0

    def accept(self, token_id: int) -> bool:
        """Advances by one token; False, and nothing changes, if it may not come next."""
        started = time.perf_counter()
        accepted = self._accept(token_id)
        self._num_slow += time.perf_counter() - started > SLOW_S
        return accepted

    @abstractmethod
    def _accept(self, token_id: int) -> bool: ...

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back."""

    @abstractmethod
    def _fill(self, mask: numpy.ndarray) -> None: ...

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """The output may end here."""

    @property
    @abstractmethod
    def terminated(self) -> bool:
        """A stop token was accepted."""

    def fill(self, mask: numpy.ndarray) -> bool:
        """Writes which tokens may come next; False if there are none: then the output must fail."""
        started = time.perf_counter()
        if self.terminated:  # a step may still be under way: whatever it samples is dropped
            mask[:] = stop_mask(self._vocabulary)
        else:
            self._fill(mask)
        self._num_slow += time.perf_counter() - started > SLOW_S
        return bool(mask.any())

    @property
    def too_slow(self) -> bool:
        """It takes so long that it delays all other requests: the output must fail."""
        return self._num_slow >= MAX_SLOW or (self.grammar is not None and self.grammar.too_slow)

    @classmethod
    def accept_all(cls, matchers: "Sequence[Matcher]", token_ids: Sequence[int]) -> list[int]:
        """`accept` for many matchers of this kind, a token each; the indices of those that refused theirs."""
        accepted = [matcher.accept(token_id) for matcher, token_id in zip(matchers, token_ids)]
        return [idx for idx, fits in enumerate(accepted) if not fits]

    @classmethod
    def fill_all(cls, matchers: "Sequence[Matcher]", masks: numpy.ndarray, rows: Sequence[int]) -> None:
        """`fill` for many matchers of this kind: matcher i writes masks[rows[i]]. No call is timed."""
        for matcher, row in zip(matchers, rows):
            matcher._fill(masks[row])

    def forced(self) -> list[int]:
        """The tokens that must follow, each the only one its mask allows, 64 at most; the matcher stays where it is.

        Libraries can give the text that must follow, but only all of it, and a short grammar can force a long text.
        """
        if self.terminated:
            return []
        mask = numpy.empty(self._vocabulary.num_words, dtype=numpy.int32)
        tokens: list[int] = []
        while len(tokens) < MAX_FORCED and not self.terminated and self.fill(mask):
            token_id = only_token(mask)
            if token_id is None or not self.accept(token_id):
                break
            tokens.append(token_id)
        if tokens:
            self.rollback(len(tokens))
        return tokens


class Grammar(ABC):
    """Compiled once, shared by requests."""

    num_bytes: int = 0  # roughly, in memory
    too_slow = False  # a call on one of its matchers took so long that it was abandoned

    def matcher(self) -> Matcher:
        matcher = self._matcher()
        matcher.grammar = self
        return matcher

    @abstractmethod
    def _matcher(self) -> Matcher: ...


class GrammarEngine(ABC):
    """One grammar library over one vocabulary. `compile` may be called from any thread."""

    name: str

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None: ...

    @staticmethod
    @abstractmethod
    def lower(spec: GrammarSpec, blanks: str | None = None) -> GrammarSpec:
        """The spec as the library takes it; RequestError for what it would not honour. Pure, and may be slow."""

    @abstractmethod
    def compile_lowered(self, spec: GrammarSpec) -> Grammar:
        """RequestError with a clear sentence where the library refuses."""

    def compile(self, spec: GrammarSpec, blanks: str | None = None) -> Grammar:
        return self.compile_lowered(self.lower(spec, blanks))


def only_token(mask: numpy.ndarray) -> int | None:
    """The token of a mask that allows exactly one."""
    words = numpy.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    if bits & (bits - 1):
        return None
    return int(words[0]) * 32 + bits.bit_length() - 1


def stop_mask(vocabulary: Vocabulary) -> numpy.ndarray:
    mask = numpy.zeros(vocabulary.num_words, dtype=numpy.uint32)
    for token_id in vocabulary.stop_ids:
        mask[token_id // 32] |= numpy.uint32(1 << token_id % 32)
    return mask.view(numpy.int32)
