"""What is known of a core that is one of several: how much it has to compute, and which prefixes it has cached.

Kept by its supervisor from what the core says and what it was sent; read by `cores.py`, which chooses by it. Empty, and
without work, where a server has one core. Knows digests and counts, not processes.
"""

from collections import Counter, deque
from collections.abc import Sequence

from quire.frontend.routing import num_cached
from quire.frontend.stream import Stream
from quire.kv.prefix import digests
from quire.messages import EngineStats, Prefixes, Ready


class CoreLoad:
    def __init__(self) -> None:
        self.known: set[int] = set()  # digests of the blocks in the core's prefix cache
        self.expected: Counter[int] = Counter()  # those that its requests will have computed with their first token
        self.prefix_block = self.hit_unit = 0  # in tokens; the core says so when it is ready
        self._num_sent = 0  # requests, to this core
        self._unanswered: deque[tuple[int, int]] = deque()  # those its stats do not count yet: (number, tokens)
        self.num_unanswered = 0  # their tokens

    def ready(self, message: Ready) -> None:
        self.prefix_block, self.hit_unit = message.prefix_block, message.hit_unit

    def forget_core(self) -> None:
        """What was known of the last core does not hold for the next. Its requests do."""
        self.known.clear()
        self._unanswered.clear()
        self._num_sent = self.num_unanswered = 0

    def sent(self, num_tokens: int) -> None:
        """A request was sent, of which so many tokens are to be computed."""
        self._num_sent += 1
        self.num_unanswered += num_tokens
        self._unanswered.append((self._num_sent, num_tokens))

    def counted(self, stats: EngineStats) -> None:
        """The core's own count has the requests that it has received."""
        while self._unanswered and self._unanswered[0][0] <= stats.num_received:
            self.num_unanswered -= self._unanswered.popleft()[1]

    def told(self, message: Prefixes) -> None:
        if message.is_reset:
            self.known.clear()
        self.known.update(digests(message.came))
        self.known.difference_update(digests(message.went))

    def expect(self, stream: Stream) -> None:
        self.expected.update(stream.prefix)

    def expect_no_more(self, stream: Stream) -> None:
        """Its prompt is computed, and the core told what it has cached of it; or it never will be."""
        for digest in stream.prefix:
            self.expected[digest] -= 1
            if not self.expected[digest]:
                del self.expected[digest]
        stream.prefix = ()

    def num_cached(self, prefix: Sequence[int]) -> int:
        """How many tokens of a prompt the core has, of which these are the digests."""
        return num_cached(prefix, self.known, self.expected, self.prefix_block, self.hit_unit)
