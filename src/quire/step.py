"""StepPlan and StepResult: all that core and workers ever say to each other about a step.

Built by `core/scheduler.py`, carried by `executor/`, read by `worker/`. Plain data, no torch; lists run parallel to `rows`.

Who owns what: the core owns rows and block ids; the worker owns the tokens themselves, and with them a row's true length. A row's
tokens arrive once, with its RowStart; after that sampled tokens are appended on the device, so step N+1 can be launched before N's
tokens are known here. Where N verifies drafts, the core does not know either how many of them will count: the starts of N+1 are then
upper bounds, and the worker goes by what it knows.
"""

import msgspec

from quire.params import SamplingParams

# What a row of a plan produces.
NOTHING = 0
TOKEN = 1  # TOKEN + k: its last k tokens are drafts to be verified; as many tokens as are accepted, and one more
VECTOR = -1  # the last token's final hidden state


class RowStart(msgspec.Struct, array_like=True):
    """A request takes a row of the worker's persistent batch; whatever was there before is forgotten."""

    row: int
    token_ids: list[int]  # prompt and what was generated before (a preemption, an engine restart)
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice_idx: int
    stop_ids: list[int]  # forbidden while below min_tokens
    bad_words: list[list[int]]
    num_prompt_logprobs: int  # positions whose prompt logprobs were delivered before; 0 on a first start


class ForcedTokens(msgspec.Struct, array_like=True):
    """Tokens of a row that no step chose, from `start` on: a grammar knew them before."""

    row: int
    start: int
    token_ids: list[int]


class Move(msgspec.Struct, array_like=True, gc=False):
    """A block is copied to a place outside of the device, or back, before the step computes; moves of a step happen in order."""

    pool_idx: int
    block: int
    place: int
    is_load: bool  # from the place to the block


class StepPlan(msgspec.Struct, array_like=True, gc=False):
    """One step: `num_tokens[i]` tokens of row `rows[i]`, the first of them at position `starts[i]`, or before it (see above)."""

    step_id: int
    new_rows: list[RowStart]
    rows: list[int]
    starts: list[int]
    num_tokens: list[int]
    produces: list[int]
    new_blocks: list[list[list[int]]]  # per row and group: block ids appended to its table
    forced: list[ForcedTokens] = []
    moves: list[Move] = []

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def num_samples(self) -> int:
        """Positions at which a token is chosen, or whose hidden state is asked for."""
        return sum(map(abs, self.produces))


class Masks(msgspec.Struct, array_like=True, gc=False):
    """What grammars allow in a step; comes between its two launches, because a step's tokens decide it for the next.

    `words` is the sender's own and is used again: whoever is given it copies it at once."""

    places: list[int]  # among the rows that produce something
    words: memoryview  # bytes of int32 [places, words]: token i may be chosen if bit i % 32 of word i // 32 is set


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Logprobs at one position: the token itself and its rank, then the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, array_like=True, gc=False):
    """What a step produced, parallel to its plan's `rows`: the tokens that count."""

    step_id: int
    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # index into rows -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # index into rows -> one per prompt token computed
    vectors: dict[int, list[float]] = {}  # index into rows
