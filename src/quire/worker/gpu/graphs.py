"""CUDA graphs: a step's many launches recorded once per shape and replayed as one.

Used by the runner. Shapes come from a ladder, so that any step finds one not much larger than itself. The commonest are recorded when
the engine starts; the rest one at a time between steps. Knows nothing of what is recorded.
"""

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

log = logging.getLogger(__name__)


def ladder(largest: int, *, smallest: int, step: int, largest_step: int) -> list[int]:
    """Sizes to `largest`: doubling to `step`, then in steps of about an eighth, so that no shape is padded by much more."""
    sizes = [smallest]
    while sizes[-1] < largest:
        size = sizes[-1] * 2 if sizes[-1] < step else sizes[-1] + step
        sizes.append(size)
        if size >= 8 * step and step < largest_step:
            step *= 2
    return sorted({min(size, largest) for size in sizes})


def fit(sizes: list[int], wanted: int) -> int:
    """The smallest of `sizes` that holds `wanted`."""
    return sizes[bisect.bisect_left(sizes, wanted)]


class Graphs:
    """Graphs by key. `record(key)` runs what is to be recorded; its results are what it leaves in buffers that stay."""

    def __init__(self, record: Callable[[Any], Any], device: torch.device) -> None:
        self.record = record
        self.enabled = device.type == "cuda"
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.failed: list[torch.cuda.CUDAGraph] = []  # kept: its memory is shared with the others
        self.wanted: list[Hashable] = []  # to be recorded, most urgent last
        if self.enabled:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.graphs

    def replay(self, key: Hashable) -> None:
        self.graphs[key].replay()

    def want(self, keys: list[Hashable], now: int) -> None:
        """The first `now` of them are recorded at once, the others later, in order."""
        if self.enabled:
            self.wanted = keys[::-1]
            for _ in range(now):
                self.capture(self.wanted.pop())

    def ask(self, key: Hashable) -> None:
        """To be recorded next, if it is not there: a shape that only some users meet."""
        if self.enabled and key not in self.graphs and key not in self.wanted:
            self.wanted.append(key)

    def record_next(self) -> None:
        """Records one that is wanted: some 20 ms of the host's time, none of the device's. Where it cannot be, steps go on without."""
        if not self.wanted:
            return
        try:
            self.capture(self.wanted.pop())
        except RuntimeError as error:
            log.warning("no more graphs are recorded, steps of other sizes will be slower: %s", str(error).split("\n")[0][:200])
            self.wanted = []

    def capture(self, key: Hashable) -> None:
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which waits for the device and collects garbage first.
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self.record(key)
            except BaseException:
                self.failed.append(graph)
                with contextlib.suppress(RuntimeError):  # it would hide the reason
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graphs[key] = graph
        log.debug("recorded %s in %.0f ms", key, 1e3 * (time.perf_counter() - started))
