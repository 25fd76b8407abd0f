"""One request's constraint as its answer grows: thinking is left alone, up to its budget; then the grammar rules.

Held by the core's request. A guide sees every token once, in order: the scheduler advances it, `masks.py` asks it what may come next. A fresh
one fed with the tokens so far is in the same state, which is how a request survives a crash.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.messages import Thinking
from quire.structured.engines.base import Matcher
from quire.structured.running import bounded

log = logging.getLogger(__name__)

CONTRADICTION = (
    "no token satisfies both the answer's grammar and logit_bias, bad_words or allowed_token_ids: drop one of them"
)
FAILED = "the grammar engine failed on this request: simplify the grammar, or choose another engine with --structured-outputs-backend"
TOO_SLOW = "following this grammar takes too long: make it simpler"
MAX_PAUSE = 7
REPLAY_S = 0.001  # of processor time, for each token of an answer that goes on after a crash
ALL = -1  # a word in which every token is allowed


class Guide:
    def __init__(self, matcher: Matcher | None, thinking: Thinking | None, stop_ids: list[int]) -> None:
        self.matcher = matcher
        self.thinking = thinking
        self.stop_ids = stop_ids
        self.is_thinking = thinking is not None and thinking.is_open
        self.may_think = (
            thinking is not None and not thinking.is_open and bool(thinking.start_ids)
        )  # it may begin, or has half begun
        self.num_opening = 0  # tokens of what opens it
        self.num_undone = 0  # of these, seen by the matcher as well: they may be the answer's
        self.num_thought = 0  # tokens
        self.patience = self.pause = 0  # tokens until it is looked again for forced ones: looking in vain costs time
        self.is_ahead = False  # the matcher has seen the next token already
        self.problem = ""  # why the request must end
        self.tail: list[int] = []  # the last tokens thought, as many as close it

    # -- tokens come -----------------------------------------------------------------------------------------------------

    def advance(self, token_ids: list[int]) -> str:
        """What is wrong, if that is so: a token came that was not allowed, or the grammar costs too much."""
        was_seen, self.is_ahead = self.is_ahead, False
        if not was_seen and not self.problem:
            in_thought = self.is_thinking and len(token_ids) == 1  # then the matcher does not see it
            if in_thought:
                fits = self._accept(token_ids[0])
            else:
                fits = self._call(lambda: self._accept_all(token_ids), len(token_ids))
            if not fits and not self.problem:
                self.problem = CONTRADICTION
        if not self.problem and self.matcher is not None and self.matcher.too_slow:
            self.problem = TOO_SLOW
        return self.problem

    def fail(self) -> None:
        """To be called where an engine's exception is caught: its fault is this request's alone."""
        log.exception("a grammar engine failed")
        self.problem = FAILED

    def give_up(self) -> None:
        """To be called where a call on the matcher was left alone: nobody may go on with its grammar."""
        self.problem = TOO_SLOW
        if self.matcher is not None and self.matcher.grammar is not None:
            self.matcher.grammar.too_slow = True

    def _call(self, function: Callable[[], Any], num_tokens: int = 1) -> Any:
        """What calls on the matcher return; None, and a problem, where one fails or takes too long."""
        if self.matcher is None:
            return function()
        try:
            return bounded.call(function, bounded.LIMIT_S + REPLAY_S * num_tokens)
        except bounded.TooSlowError:
            self.give_up()
        except Exception:
            self.fail()
        return None

    def _accept_all(self, token_ids: list[int]) -> bool:
        return all([self._accept(token_id) for token_id in token_ids])

    def _accept(self, token_id: int) -> bool:
        if self.may_think:
            return self._begin(token_id)
        if not self.is_thinking:
            return self.matcher is None or self.matcher.accept(token_id)
        self.num_thought += 1
        end_ids = self.thinking.end_ids
        self.tail = [*self.tail, token_id][-len(end_ids) :]
        if self.tail == end_ids:
            self.is_thinking = False
        return True

    def _begin(self, token_id: int) -> bool:
        """While the answer may still turn out to be thinking, both are followed."""
        could_answer = self.num_undone == self.num_opening
        answers = could_answer and (self.matcher is None or self.matcher.accept(token_id))
        if token_id != self.thinking.start_ids[self.num_opening]:
            self.may_think = False
            return answers
        self.num_opening += 1
        self.num_undone += answers
        if self.num_opening == len(self.thinking.start_ids):
            self.may_think, self.is_thinking = False, True
            if self.matcher is not None:
                self.matcher.rollback(self.num_undone)
        return True

    # -- what may come next ----------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Nobody looks for forced tokens now."""
        self.pause = 1

    def forced(self) -> list[int]:
        """Tokens that follow for certain."""
        if self.is_thinking:
            return self._closing()
        if self.matcher is None or self.may_think or self.problem:
            return []
        if self.pause:
            self.pause -= 1
            return []
        found = self._call(self.matcher.forced) or []
        self.patience = 0 if found else min(2 * self.patience + 1, MAX_PAUSE)
        self.pause = self.patience
        return found

    def fill(self, words: np.ndarray) -> None:
        """`words` becomes the mask of the next token. May take for ever: for threads that can be left alone."""
        try:
            if not self.problem:
                self._fill(words)
        except Exception:
            self.fail()
        if self.problem:
            words[:] = ALL

    def _fill(self, words: np.ndarray) -> None:
        if self.is_thinking:
            closing = self._closing()
            words[:] = 0 if closing else ALL
            if closing:
                _set(words, closing[0])
            elif self.matcher is not None:  # without an answer it must not end
                for token_id in self.stop_ids:
                    _clear(words, token_id)
        elif self.matcher is None:
            words[:] = ALL
        elif self.may_think:
            words[:] = 0
            if self.num_undone == self.num_opening:
                self.matcher.fill(words)
            _set(words, self.thinking.start_ids[self.num_opening])
        else:
            self.matcher.fill(words)

    @property
    def is_free(self) -> bool:
        """Whether any token may come next: then there is nothing to fill."""
        return self.matcher is None and not (self.is_thinking and self._closing())

    def can_see(self, token_id: int) -> bool:
        """Whether this token may be seen ahead: it matters to the matcher alone, does not end it, and nobody looks for forced ones then."""
        return self.pause > 0 and self.is_ruled and not self.problem and token_id not in self.stop_ids

    @property
    def is_ruled(self) -> bool:
        """Whether the grammar alone says what comes next."""
        return self.matcher is not None and not (self.is_thinking or self.may_think)

    def _closing(self) -> list[int]:
        """What is left of the marker that closes the thinking, once the budget is used up."""
        thinking = self.thinking
        if thinking.budget is None or self.num_thought < thinking.budget:
            return []
        for done in range(len(thinking.end_ids) - 1, 0, -1):  # the model may have begun it
            if self.tail[-done:] == thinking.end_ids[:done]:
                return thinking.end_ids[done:]
        return thinking.end_ids


def _set(words: np.ndarray, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(words: np.ndarray, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
