"""A request as the core sees it: its tokens, how many of them are computed, and what the scheduler knows of it.

Made by `core/engine.py` for each choice of an AddRequest, changed by the scheduler. Must not know text.
"""

import enum
import time
from typing import TYPE_CHECKING

from quire.core.drafting import DraftLength
from quire.kv.manager import RequestBlocks
from quire.messages import AddRequest
from quire.params import SamplingParams
from quire.spec.proposer import Proposer

if TYPE_CHECKING:  # this imports grammar engines, which are large
    from quire.core.guides import RequestGuide

NO_ROW = -1


class Status(enum.Enum):
    PARKED = 0  # a choice that waits for its sibling to compute the prompt they share
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Request:
    """The next steps compute the tokens of a request that are known but not computed yet."""

    __slots__ = (
        "request_id",
        "choice_idx",
        "params",
        "seed",
        "priority",
        "key",
        "stop_ids",
        "eos_ids",
        "bad_words",
        "cache_salt",
        "token_ids",
        "num_prompt_tokens",
        "max_total_tokens",
        "num_computed",
        "num_in_flight",
        "num_sampling",
        "status",
        "row",
        "blocks",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_cached_tokens",
        "leader",
        "followers",
        "num_dependents",
        "arrival",
        "queue_s",
        "guide",
        "forced_from",
        "num_forced",
        "num_row_start",
        "num_drafts",
        "num_wanted",
        "drafts",
        "draft_length",
        "proposer",
        "is_predicted",
        "wants_vector",
        "owner",
        "num_charged",
        "num_expected",
        "num_queued",
    )

    blocks: RequestBlocks  # set when the scheduler adds the request
    draft_length: DraftLength  # likewise

    def __init__(self, message: AddRequest, choice_idx: int, params: SamplingParams, max_model_len: int) -> None:
        self.request_id = message.request_id
        self.choice_idx = choice_idx
        self.params = params
        self.seed = message.seed
        self.priority = message.priority
        self.key: tuple[int, int] = (0, 0)  # its place in line, smaller first; set by the policy
        # When a grammar is complete, an end token is all that it allows: it must end the request.
        ignores_eos = params.ignore_eos and message.constraint is None
        self.eos_ids = frozenset() if ignores_eos else frozenset(message.eos_ids)
        self.stop_ids = frozenset(params.stop_token_ids)
        self.bad_words = message.bad_words
        self.cache_salt = message.cache_salt

        self.token_ids = message.prompt_token_ids + message.choices[choice_idx]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        limit = self.num_prompt_tokens + (params.max_tokens or max_model_len)
        self.max_total_tokens = min(limit, max_model_len)
        self.wants_vector = message.wants_vector
        if self.wants_vector:
            self.max_total_tokens = self.num_prompt_tokens + 1  # all of the prompt is computed, and nothing else

        self.num_computed = 0  # tokens that are in the cache, by steps that were applied
        self.guide: RequestGuide | None = None  # follows the grammar of its answer
        self.forced_from: int | None = None  # position of the first token that the worker is still to be told
        self.num_forced = 0  # how often it got forced tokens

        self.num_in_flight = 0  # tokens given to steps not applied yet, drafts included
        self.num_sampling = 0  # tokens that those steps will choose, at most
        self.status = Status.WAITING
        self.row = NO_ROW  # of the worker's persistent batch, while it runs
        # Tokens it had when it took its row, or was last forced: drafts follow only tokens that were sampled since.
        self.num_row_start = 0
        # Drafts that follow its last token on the worker, as far as is known; None: as many as there can be.
        self.num_drafts: int | None = None
        # With a grammar, which must know drafts: how many the newest step asks for; and those after its last token.
        self.num_wanted = 0
        self.drafts: list[int] = []
        self.is_predicted = bool(message.prediction)
        self.proposer: Proposer | None = None  # guesses its next tokens in the core
        self.num_preemptions = 0  # also tells results of steps planned before a preemption from later ones
        self.num_prompt_logprobs = 0  # prompt positions whose logprobs were delivered
        self.num_cached_tokens = 0  # length of the first prefix hit
        self.owner = message.owner
        self.num_charged = 0  # tokens that count for its owner already
        self.num_expected = 0  # tokens that were cached when it came, where that is asked for
        self.num_queued = 0  # tokens that it counts for while it waits
        self.arrival = time.monotonic()
        self.queue_s = 0.0  # how long it waited for its first step
        self.leader: Request | None = None  # the sibling that computes the prompt they share
        self.followers: list[Request] = []  # siblings that are parked until it has computed the prompt
        self.num_dependents = 0  # siblings that may still fork from it

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Tokens there will be, at most, when the steps in flight have run; the last one allowed is never computed."""
        return min(len(self.token_ids) + self.num_sampling, self.max_total_tokens - 1)

    def force(self, token_ids: list[int]) -> tuple[str | None, int | str | None]:
        """`extend`, with forced tokens: what steps in flight choose in their place is dropped."""
        if self.forced_from is None:
            self.forced_from = len(self.token_ids)
        self.num_sampling = 0
        self.num_forced += 1
        ended = self.extend(token_ids)
        self.num_row_start = len(self.token_ids)
        return ended

    def extend(self, token_ids: list[int]) -> tuple[str | None, int | str | None]:
        """Appends tokens up to one that ends the request, and drops the rest; returns (finish_reason, stop_reason).

        Called for every token of the request that is not prompt.
        """
        known = self.token_ids
        repetition = self.params.repetition_detection
        for idx, token_id in enumerate(token_ids):
            known.append(token_id)
            if token_id in self.eos_ids or token_id in self.stop_ids:
                if self.num_output_tokens >= self.params.min_tokens:
                    del token_ids[idx + 1 :]
                    return "stop", None if token_id in self.eos_ids else token_id
            if len(known) >= self.max_total_tokens:
                del token_ids[idx + 1 :]
                return "length", None
            if repetition is not None and self.num_output_tokens >= self.params.min_tokens:
                if repetition.found(known, self.num_output_tokens):
                    del token_ids[idx + 1 :]
                    return "repetition", "repetition_detected"
        return None, None
