"""How long the requests of the last minute took, in percentiles, for those who watch the engine.

Made by the server with the first watcher and dropped with the last; fed by `serving.py`, a few times per request.
"""

import time
from collections import deque
from collections.abc import Callable

import msgspec

WINDOW_S = 60
MAX_REQUESTS = 512


class Percentiles(msgspec.Struct):
    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Window:
    """Values of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.values: deque[tuple[float, float]] = deque(maxlen=MAX_REQUESTS)  # (when, ms)

    def add(self, seconds: float) -> None:
        self.values.append((self.clock(), seconds * 1000))

    def percentiles(self) -> Percentiles:
        values = self.values
        while values and values[0][0] < self.clock() - WINDOW_S:
            values.popleft()
        ordered = sorted(value for _, value in values)
        count = len(ordered)
        if not count:
            return Percentiles(0)
        # The smallest value that so large a share of all does not exceed.
        return Percentiles(count, *(round(ordered[-(-count * share // 100) - 1], 2) for share in (50, 90, 99)))


class Latencies:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first_token = Window(clock)
        self.request = Window(clock)
        self.token = Window(clock)  # mean time per token after the first
