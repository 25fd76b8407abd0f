"""StepPlan and StepResult: all that core and workers ever say to each other about a step.

Built by `core/scheduler.py`, carried by `executor/`, read by `worker/`. Plain data, no torch. Lists of a plan or a
result are parallel to the plan's `rows`.

Who owns what: the core owns rows and block ids; the worker owns the tokens themselves, and with them a row's true
length. A row's tokens are sent once, with its RowStart. After that the worker appends sampled tokens on the device, so
step N+1 can be launched before the core knows the tokens of step N. When step N verifies drafts, the core does not know
either how many of them will be accepted: the starts of N+1 are then upper bounds, and the worker uses the true lengths.
"""

import msgspec

from quire.params import SamplingParams

# What a row of a plan produces.
NOTHING = 0
# TOKEN + k: the row's last k tokens are drafts to be verified; it produces those that are accepted, and one more.
TOKEN = 1
VECTOR = -1  # the last token's final hidden state
MIN_SAMPLES = 8


def max_samples(max_num_rows: int, num_drafts: int) -> int:
    """At how many positions a step may choose tokens; `num_drafts`: what workers guess for a row, at most."""
    return max(max_num_rows * (1 + num_drafts), MIN_SAMPLES)


class RowStart(msgspec.Struct, array_like=True):
    """A request takes a row of the worker's persistent batch; the row's previous contents are discarded."""

    row: int
    token_ids: list[int]  # the prompt, and what was generated before a preemption or an engine restart
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice_idx: int
    stop_ids: list[int]  # forbidden while below min_tokens
    bad_words: list[list[int]]
    num_prompt_logprobs: int  # positions whose prompt logprobs were delivered before; 0 on a first start


class RowTokens(msgspec.Struct, array_like=True):
    """Tokens of a row, from position `start` on, that the core knows or guesses without having them sampled."""

    row: int
    start: int
    token_ids: list[int]


class Move(msgspec.Struct, array_like=True, gc=False):
    """A copy of a block to a place outside of the device, or back, before the step computes.

    The moves of a step happen in order.
    """

    pool_idx: int
    block: int
    place: int
    is_load: bool  # from the place to the block


class StepPlan(msgspec.Struct, array_like=True, gc=False):
    """One step: `num_tokens[i]` tokens of row `rows[i]`, the first of them at position `starts[i]`.

    After a step that verified drafts the first token may lie before `starts[i]` (see the top of this file).
    """

    step_id: int
    new_rows: list[RowStart]
    rows: list[int]
    starts: list[int]
    num_tokens: list[int]
    produces: list[int]
    new_blocks: list[list[list[int]]]  # per row and group: block ids appended to its table
    forced: list[RowTokens] = []  # the grammar allowed no others
    drafts: list[RowTokens] = []  # guesses of the core, for rows none of whose steps is in flight
    moves: list[Move] = []
    num_wanted: list[int] = []  # tokens to be guessed after those that a row chooses, for the next step
    tells_drafts: bool = False  # the result is to say what was guessed: a grammar must know

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def wants_drafts(self) -> bool:
        return any(self.num_wanted)

    @property
    def verifies(self) -> bool:
        """Some of the step's tokens are drafts."""
        return max(self.produces, default=0) > TOKEN

    @property
    def only_verifies(self) -> bool:
        """Every token of the step chooses the next one, and some are drafts."""
        return self.num_tokens == self.produces and max(self.num_tokens, default=0) > 1

    @property
    def num_samples(self) -> int:
        """Positions at which a token is chosen, or whose hidden state is asked for."""
        return sum(map(abs, self.produces))


class Masks(msgspec.Struct, array_like=True, gc=False):
    """The tokens that grammars allow in a step.

    Sent between the two launches of a step, because they depend on the tokens of the step before. The sender reuses
    the memory of `words`: the receiver must copy it at once.
    """

    places: list[int]  # indices among the positions at which a token is chosen
    words: memoryview  # bytes of int32 [places, words]: token i may be chosen if bit i % 32 of word i // 32 is set


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Logprobs at one position: the token itself and its rank, then the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, array_like=True, gc=False):
    """What a step produced."""

    step_id: int
    token_ids: list[list[int]]  # per row of the plan: the tokens sampled; of drafts, those accepted and one more
    logprobs: dict[int, list[TokenLogprobs]] = {}  # index into rows -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # index into rows -> one per prompt token computed
    vectors: dict[int, list[float]] = {}  # index into rows
    num_drafts: list[int] = []  # per row: drafts that follow what it chose; empty: always as many
    overflowed: list[int] = []  # indices into rows: their logits are no numbers, as float16 was too small
    # Per row: what stands after the tokens it chose, as many as can be guessed; empty: the plan did not ask.
    drafts: list[list[int]] = []
