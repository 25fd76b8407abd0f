"""How many drafts a request verifies: as many as its own have been worth, and as the step can bear.

Used by the scheduler. A draft that is rejected costs what computing a token costs, where a step is bound by its
arithmetic; where it is bound by reading the weights it costs little. Knows no tokens.
"""

import bisect

from quire.config.speculation import Speculation
from quire.messages import AddRequest
from quire.spec.prediction import Prediction
from quire.spec.proposer import Proposer
from quire.spec.suffix import Recent, Suffix

# A step of up to so many tokens takes not much longer than one of a single token: it reads the same weights.
CPU_TOKENS, GPU_TOKENS = 8, 64
CPU_PROPOSED, GPU_PROPOSED = 7, 4  # tokens that the core guesses at once for a request that asks for it, at most
MAX_PAUSE = 31  # steps, after drafts that were not worth it
FADING = 0.6  # what older drafts count, against those of the last step
MOST_RIGHT = 6.0  # drafts that count at most, so that a long run of right ones is soon forgotten
FIRST_RIGHT, FIRST_WRONG = 1.0, 0.3  # drafts that a request is credited with before it has any


def costs(num_drafts: int, on_cpu: bool, draft_cost: float = 0.0) -> list[float]:
    """How long steps with 0, 1, … up to `num_drafts` drafts take, each `draft_cost` to guess, in steps without.

    Products of a CPU take four rows at a time: with 135 million and 500 million weights in 4 bits, 4 rows take 1.2 to
    1.4 times as long as one, 5 rows 1.7 times, 8 rows 1.9 to 2, 12 rows 2.7. Those of a GPU take up to 16 rows in the
    same time: on an H200, with 8 billion weights, 5 rows take 1.16 times as long as one, with 0.6 billion 1.65 times.
    """
    if on_cpu:
        verifying = [0.7 * (k // 4) + 0.1 * (k % 4) for k in range(num_drafts + 1)]
    else:
        verifying = [0.25 + 0.01 * k if k else 0.0 for k in range(num_drafts + 1)]
    return [1 + verify + k * draft_cost for k, verify in enumerate(verifying)]


def best_length(acceptance: float, step_costs: list[float]) -> int:
    """How many drafts give most tokens in the same time, if each is right as often as `acceptance` says."""
    best, best_speed = 0, 1.0
    num_tokens, probability = 1.0, 1.0
    for k, cost in enumerate(step_costs[1:], 1):
        probability *= acceptance
        num_tokens += probability
        if num_tokens / cost > best_speed:
            best, best_speed = k, num_tokens / cost
    return best


class DraftLength:
    """Of one request: how many drafts to verify next, by how many of the last ones were right and what they cost."""

    __slots__ = ("num_pauses", "num_right", "num_wrong", "pause", "step_costs", "wanted")

    def __init__(self, step_costs: list[float]) -> None:
        self.step_costs = step_costs  # of steps with 0, 1, … drafts
        self.num_right, self.num_wrong = FIRST_RIGHT, FIRST_WRONG  # drafts of late
        self.pause = 0  # steps without drafts that are still to come
        self.num_pauses = 0  # in a row
        self.wanted = max(self._least, self._best(FIRST_RIGHT, FIRST_WRONG))

    def take(self) -> int:
        """For the next step."""
        if self.pause:
            self.pause -= 1
            return 0
        return self.wanted

    def next_most(self, num_drafts: int) -> int:
        """What the step after one that verifies so many drafts may want: as if all are right."""
        if self.pause:
            return 0
        if not num_drafts:
            return self.wanted
        num_right = min(MOST_RIGHT, FADING * self.num_right + num_drafts)
        return max(self.wanted, self._best(num_right, FADING * self.num_wrong))

    def saw(self, num_drafts: int, num_accepted: int) -> None:
        """So many of a step's drafts were accepted. If drafts are not worth it, there are none for a while."""
        self.num_right = min(MOST_RIGHT, FADING * self.num_right + num_accepted)
        self.num_wrong = FADING * self.num_wrong + (num_accepted < num_drafts)
        self.wanted = self._best(self.num_right, self.num_wrong)
        if self.wanted:
            self.num_pauses = 0
        else:
            self.num_pauses += 1
            self.pause = min(2**self.num_pauses - 1, MAX_PAUSE)
            self.wanted = self._least

    @property
    def _least(self) -> int:
        return min(1, len(self.step_costs) - 1)

    def _best(self, num_right: float, num_wrong: float) -> int:
        return best_length(num_right / (num_right + num_wrong), self.step_costs)


class Drafting:
    """What holds for all requests. `num_drafts`: what the workers' drafter guesses for a row, at most; 0: nothing."""

    def __init__(
        self,
        num_drafts: int = 0,
        speculation: Speculation | None = None,
        on_cpu: bool = False,
        num_ahead: int = 0,
        draft_cost: float = 0.0,
    ) -> None:
        self.num_drafts = num_drafts
        self.num_ahead = num_ahead  # tokens for which the workers' drafter needs blocks, after those of a step
        self.speculation = speculation
        self.recent: Recent | None = None  # answers that later requests may repeat
        if speculation is not None and speculation.method == "suffix":
            self.recent = Recent(speculation)
        self.by_batch_size = () if speculation is None else speculation.by_batch_size
        self.cheap_tokens = CPU_TOKENS if on_cpu else GPU_TOKENS
        unless_configured = CPU_PROPOSED if on_cpu else GPU_PROPOSED
        self.num_proposed = unless_configured if speculation is None else speculation.num_tokens
        self.costs = costs(num_drafts, on_cpu, draft_cost)
        self.costs_proposed = costs(self.num_proposed, on_cpu)
        if self.by_batch_size:  # the operator knows what is worth it
            self.costs, self.costs_proposed = [1.0] * (1 + num_drafts), [1.0] * (1 + self.num_proposed)

    def proposer(self, message: AddRequest) -> Proposer | None:
        """Guesses the next tokens of a request in the core, if that is where they are guessed."""
        num_prompt_tokens = len(message.prompt_token_ids)
        if message.prediction:
            return Prediction(message.prediction, num_prompt_tokens)
        if self.speculation is None:
            return None
        # Of drafts that count as right by chance a grammar would allow none.
        is_chance = self.speculation.chances and message.constraint is not None
        if self.recent is not None or is_chance:
            return Suffix(self.speculation, num_prompt_tokens, self.recent, (message.owner, message.cache_salt))
        return None

    def draft_length(self, proposer: Proposer | None) -> DraftLength:
        """Of a new request, whose tokens are guessed by the workers, or by a proposer of its own."""
        return DraftLength(self.costs if proposer is None else self.costs_proposed)

    def most_proposed(self, num_running: int) -> int:
        """Guesses of the core for a request, in a step of so many."""
        return self._most(self.num_proposed, num_running)

    def most(self, num_running: int) -> int:
        """Drafts of the workers for a request, in a step of so many."""
        return self._most(self.num_drafts, num_running)

    def _most(self, num_tokens: int, num_running: int) -> int:
        if self.by_batch_size:
            at = bisect.bisect_right(self.by_batch_size, num_running, key=lambda entry: entry[0]) - 1
            return min(num_tokens, self.by_batch_size[max(at, 0)][1])
        return min(num_tokens, max(0, self.cheap_tokens // max(1, num_running) - 1))
