"""A histogram in which one call counts many equal observations, in O(log buckets) and without a lock.

Used where one step makes the same observation for hundreds of tokens; prometheus-client's own histogram takes one
observation per call. Knows numbers only.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # each bucket's highest value, ascending; one more bucket counts values above all
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus' buckets: how many observations are at most each bound."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts)))
