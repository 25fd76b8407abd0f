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

# A step of up to so many tokens takes not much longer than one of a single token: it reads the same weights. Of
# SmolLM2 on a CPU with AVX-512, 4 tokens take 1.4 times as long, 8 tokens 2.5 times.
CPU_TOKENS, GPU_TOKENS = 8, 64
CPU_PROPOSED, GPU_PROPOSED = 3, 4  # tokens that the core guesses at once for a request that asks for it
FIRST_LENGTH = 3  # drafts that a request verifies at first
MAX_PAUSE = 31  # steps, after drafts that were all rejected


class DraftLength:
    """Of one request: how many drafts to verify next, by how many of the last ones were accepted."""

    __slots__ = ("num_misses", "pause", "wanted")

    def __init__(self, most: int) -> None:
        self.wanted = min(most, FIRST_LENGTH)
        self.pause = 0  # steps without drafts that are still to come
        self.num_misses = 0  # times in a row that none was accepted

    def take(self) -> int:
        """For the next step."""
        if self.pause:
            self.pause -= 1
            return 0
        return self.wanted

    def next_most(self, num_drafts: int) -> int:
        """What the step after one that verifies so many drafts may want."""
        return 0 if self.pause else max(self.wanted, 2 * num_drafts)

    def saw(self, num_drafts: int, num_accepted: int, most: int) -> None:
        """So many of a step's drafts were accepted: if all, more are tried, if none, none for a while."""
        if num_accepted == num_drafts:
            self.wanted = min(most, max(self.wanted, 2 * num_drafts))
        else:
            self.wanted = num_accepted + 1
        if num_accepted:
            self.num_misses = 0
        else:
            self.num_misses += 1
            self.pause = min(2**self.num_misses - 1, MAX_PAUSE)


class Drafting:
    """What holds for all requests. `num_drafts`: what the workers' drafter guesses for a row, at most; 0: nothing."""

    def __init__(
        self, num_drafts: int = 0, speculation: Speculation | None = None, on_cpu: bool = False, num_ahead: int = 0
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

    def proposer(self, message: AddRequest) -> Proposer | None:
        """Guesses the next tokens of a request in the core, if that is where they are guessed.

        A request with a grammar is one: the core must know drafts in order to check them.
        """
        num_prompt_tokens = len(message.prompt_token_ids)
        if message.prediction:
            return Prediction(message.prediction, num_prompt_tokens)
        if self.speculation is not None and (self.recent is not None or message.constraint is not None):
            return Suffix(self.speculation, num_prompt_tokens, self.recent, (message.owner, message.cache_salt))
        return None

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
