"""One request's constraint as its answer grows: thinking is free, up to its budget; after it the grammar applies.

Held by the core's request. A guide sees every token once, in order: the scheduler advances it, `masks.py` asks it what
may come next. A new guide that is given the tokens so far is in the same state: that is how a request survives a crash.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from quire.messages import Thinking
from quire.structured.engines.base import Matcher
from quire.structured.running import bounded

log = logging.getLogger(__name__)

CONTRADICTION = (
    "no token satisfies both the answer's grammar and logit_bias, bad_words or allowed_token_ids: drop one of them"
)
FAILED = (
    "the grammar engine failed on this request: simplify the grammar, "
    "or choose another engine with --structured-outputs-backend"
)
TOO_SLOW = "following this grammar takes too long: make it simpler"
MAX_PAUSE = 7  # tokens
REPLAY_S = 0.001  # of processor time, for each token of an answer that is resumed after a crash
ALL = -1  # a word of a mask that allows all of its 32 tokens


class Guide:
    def __init__(self, matcher: Matcher | None, thinking: Thinking | None, stop_ids: list[int]) -> None:
        self.matcher = matcher
        self.thinking = thinking if thinking is not None else Thinking(is_open=False, start_ids=[], end_ids=[])
        self.stop_ids = stop_ids
        self.is_thinking = self.thinking.is_open
        self.may_think = bool(self.thinking.start_ids) and not self.is_thinking  # it may begin, or has begun in part
        self.num_opening = 0  # tokens seen so far of those that open the thinking
        self.num_undone = 0  # of these, the ones the matcher has accepted as well: they may belong to the answer
        self.num_thought = 0  # tokens of the thinking so far
        self.pause = 0  # tokens until forced ones are looked for again: looking without finding any costs time
        self.patience = 0  # the length of the last pause
        self.is_ahead = False  # the matcher has seen the next token already
        self.problem = ""  # why the request must end
        self.tail: list[int] = []  # the last tokens of the thinking, as many as close it

    # -- new tokens ----------------------------------------------------------------------------------------------------

    def advance(self, token_ids: list[int]) -> str:
        """Takes tokens; gives the problem if there is one: a token was not allowed, or the grammar takes too long."""
        was_seen = self.is_ahead
        self.is_ahead = False
        if not was_seen and not self.problem:
            if self.is_thinking and len(token_ids) == 1:  # the matcher does not see it: no need for a thread
                fits = self._accept(token_ids[0])
            else:
                fits = self._call(lambda: self._accept_all(token_ids), len(token_ids))
            if not fits and not self.problem:
                self.problem = CONTRADICTION
        too_slow = self.matcher is not None and self.matcher.too_slow
        if too_slow and not self.problem:
            self.problem = TOO_SLOW
        return self.problem

    def fail(self) -> None:
        """To be called where an engine's exception is caught: only this request fails."""
        log.exception("a grammar engine failed")
        self.problem = FAILED

    def give_up(self) -> None:
        """To be called where a call on the matcher was abandoned: no request may use its grammar any more."""
        self.problem = TOO_SLOW
        if self.matcher is not None and self.matcher.grammar is not None:
            self.matcher.grammar.too_slow = True

    def _call(self, function: Callable[[], Any], num_tokens: int = 1) -> Any:
        """The result of a function that calls the matcher; None, and a problem, if it fails or takes too long."""
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
            return self._accept_either(token_id)
        if not self.is_thinking:
            return self.matcher is None or self.matcher.accept(token_id)
        self.num_thought += 1
        end_ids = self.thinking.end_ids
        self.tail = [*self.tail, token_id][-len(end_ids) :]
        if self.tail == end_ids:
            self.is_thinking = False
        return True

    def _accept_either(self, token_id: int) -> bool:
        """While these tokens may be an answer or the opening of thinking, both are followed."""
        could_answer = self.num_undone == self.num_opening
        can_answer = could_answer and (self.matcher is None or self.matcher.accept(token_id))
        if token_id != self.thinking.start_ids[self.num_opening]:
            self.may_think = False
            return can_answer
        self.num_opening += 1
        self.num_undone += can_answer
        if self.num_opening == len(self.thinking.start_ids):
            self.may_think = False
            self.is_thinking = True
            if self.matcher is not None:
                self.matcher.rollback(self.num_undone)
        return True

    # -- what may come next --------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Forced tokens are not looked for now."""
        self.pause = 1

    def forced(self) -> list[int]:
        """Tokens that must follow."""
        if self.is_thinking:
            return self._closing()
        may_answer = not (self.may_think or self.problem)
        if self.matcher is None or not may_answer:
            return []
        if self.pause:
            self.pause -= 1
            return []
        found = self._call(self.matcher.forced) or []
        self.patience = 0 if found else min(2 * self.patience + 1, MAX_PAUSE)
        self.pause = self.patience
        return found

    def allowed(self, token_ids: list[int]) -> list[int]:
        """The first of these drafts, as far as they may follow; none of them ends the thinking or the answer."""
        is_last = self.thinking.end_ids.__contains__ if self.is_thinking else self.stop_ids.__contains__
        token_ids = list(takewhile(lambda token_id: not is_last(token_id), token_ids))
        if self.may_think or self.problem:
            return []
        if self.is_thinking:
            budget = self.thinking.budget
            return token_ids if budget is None else token_ids[: max(0, budget - self.num_thought - 1)]
        if self.matcher is None:
            return token_ids
        num_allowed = self._call(lambda: self._num_allowed(token_ids), len(token_ids)) or 0
        return token_ids[:num_allowed]

    def _num_allowed(self, token_ids: list[int]) -> int:
        matcher, count = self.matcher, 0
        if matcher is not None:
            for token_id in token_ids:
                if not matcher.accept(token_id):
                    break
                count += 1
            matcher.rollback(count)
        return count

    def fill_each(self, words: np.ndarray, drafts: Sequence[int]) -> None:
        """`fill`, of the next token and of the one after each draft. After one that may not come, anything may."""
        thinking = self.is_thinking, self.num_thought, self.tail
        num_seen = 0  # drafts that the matcher has accepted
        self.fill(words[0])
        for place, draft in enumerate(drafts, 1):
            was_ruled = self.is_ruled
            if self.may_think or not self._fits(draft):
                words[place:] = ALL
                break
            num_seen += was_ruled
            self.fill(words[place])
        self.is_thinking, self.num_thought, self.tail = thinking
        if num_seen and self.matcher is not None:
            self.matcher.rollback(num_seen)

    def _fits(self, token_id: int) -> bool:
        """`_accept`, of a draft."""
        try:
            return not self.problem and self._accept(token_id)
        except Exception:
            self.fail()
            return False

    def fill(self, words: np.ndarray) -> None:
        """Writes the mask of the next token to `words`. May never return: for threads that can be abandoned."""
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
            elif self.matcher is not None:  # the output must not end before the answer
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

    def is_free(self, num_drafts: int) -> bool:
        """Whether any token may come next, and after so many drafts: then there is nothing to fill."""
        budget = self.thinking.budget if self.is_thinking else None
        return self.matcher is None and (budget is None or self.num_thought + num_drafts < budget)

    def can_see(self, token_id: int) -> bool:
        """Whether the matcher may see this token ahead of `advance`.

        Only if nothing but the matcher must see it, it is no stop token, and forced tokens are not looked for after it.
        """
        if self.pause == 0 or self.problem:
            return False
        return self.is_ruled and token_id not in self.stop_ids

    @property
    def is_ruled(self) -> bool:
        """Whether the grammar alone decides what comes next."""
        return self.matcher is not None and not (self.is_thinking or self.may_think)

    def _closing(self) -> list[int]:
        """The tokens that must still come to close the thinking, once the budget is used up."""
        budget, end_ids = self.thinking.budget, self.thinking.end_ids
        if budget is None or self.num_thought < budget:
            return []
        for num_closing in range(len(end_ids) - 1, 0, -1):  # the model may have written the first of them
            if self.tail[-num_closing:] == end_ids[:num_closing]:
                return end_ids[num_closing:]
        return end_ids


def _set(words: np.ndarray, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(words: np.ndarray, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
