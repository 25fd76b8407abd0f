"""CUDA graphs: a step's many launches, recorded once per shape and replayed as one.

Used by the runner. Shapes come from a ladder of sizes, so that any step finds one not much larger than itself. The most
common shapes are recorded when the engine starts, the others one at a time between steps.
"""

import bisect
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.layers.attention.base import StepShape
from quire.worker.failure import first_line
from quire.worker.inputs import SampleShape, decode_shape, mixed_shape

if TYPE_CHECKING:
    from quire.worker.runner import Runner

log = logging.getLogger(__name__)

FIRST_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # recorded before the first request is served
MAX_PLACES = 64  # of rows that verify drafts, which are rows of their own there


def ladder(largest: int, *, smallest: int, step: int, largest_step: int) -> list[int]:
    """Sizes up to `largest`: doubling up to `step`, then by about an eighth, so that no step is padded by much more."""
    sizes = [smallest]
    while sizes[-1] < largest:
        size = sizes[-1] * 2 if sizes[-1] < step else sizes[-1] + step
        sizes.append(size)
        if size >= 8 * step and step < largest_step:
            step *= 2
    return sorted({min(size, largest) for size in sizes})


def fit(sizes: list[int], size: int) -> int:
    """The smallest of `sizes` that holds `size`."""
    return sizes[bisect.bisect_left(sizes, size)]


def in_order(sizes: list[int]) -> tuple[list[int], int]:
    """Sizes in the order of recording, and how many of them are recorded before the first request is served.

    Those are the most common ones; in both parts the largest comes first.
    """
    first = [size for size in sizes if size in FIRST_ROWS or size == sizes[-1]]
    return sorted(sizes, key=lambda size: (size not in first, -size)), len(first)


class Graphs:
    """Graphs by key. `record(key)` runs what is recorded; it leaves its results in buffers at fixed addresses."""

    def __init__(self, record: Callable[[Any], Any], device: torch.device) -> None:
        self.record = record
        self.enabled = device.type == "cuda"
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.failed: list[torch.cuda.CUDAGraph] = []  # kept, because they share memory with the others
        self.to_record: list[Hashable] = []  # the next one last
        if self.enabled:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.graphs

    def replay(self, key: Hashable) -> None:
        self.graphs[key].replay()

    def want(self, keys: Sequence[Hashable], now: int) -> None:
        """The first `now` of them are recorded at once, the others later, in order."""
        if self.enabled:
            self.to_record = list(reversed(keys))
            for _ in range(now):
                self.capture(self.to_record.pop())

    def ask(self, key: Hashable) -> None:
        """Records the key next, if it is not recorded yet: a shape that only some users need."""
        is_known = key in self.graphs or key in self.to_record
        if self.enabled and not is_known:
            self.to_record.append(key)

    def record_next(self) -> None:
        """Records one of `to_record`: about 20 ms of the host's time, none of the device's.

        If that fails, no more graphs are recorded.
        """
        if not self.to_record:
            return
        try:
            self.capture(self.to_record.pop())
        except RuntimeError as error:
            log.warning("no more graphs are recorded, steps of other sizes will be slower: %s", first_line(error))
            self.to_record = []

    def capture(self, key: Hashable) -> None:
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would first wait for the device and collect garbage.
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self.record(key)
            except BaseException:
                self.failed.append(graph)
                with contextlib.suppress(RuntimeError):  # a second error would hide the first
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graphs[key] = graph
        log.debug("recorded %s in %.0f ms", key, 1e3 * (time.perf_counter() - started))


class Recordings:
    """Graphs of forward passes and of samplings."""

    def __init__(self, runner: "Runner") -> None:
        limits = runner.limits
        self.runner = runner
        self.limits = limits
        self.forwards = Graphs(runner.compute, limits.hidden_like.device)
        self.samplings = Graphs(runner.choose, limits.hidden_like.device)
        most_rows = max(limits.num_rows, min(limits.num_samples, MAX_PLACES))
        self.row_sizes = ladder(most_rows, smallest=1, step=4, largest_step=16)
        self.sample_sizes = ladder(limits.num_samples, smallest=1, step=4, largest_step=16)
        self.token_sizes = ladder(limits.max_tokens, smallest=64, step=64, largest_step=512)

    def get_ready(self) -> None:
        """Records the most common shapes, the largest first so that the others fit into its memory; the rest later."""
        if not self.forwards.enabled:
            return
        row_sizes, num_first = in_order(self.row_sizes)
        decodes = [decode_shape(size) for size in row_sizes]
        mixed = [mixed_shape(self.limits, size) for size in reversed(self.token_sizes)]
        if all(backend.is_recordable for backend in self.runner.inputs.backends):
            self.forwards.want(mixed[:1] + decodes + mixed[1:], now=1 + num_first)
        sample_sizes, num_first = in_order(self.sample_sizes)
        samplings = [SampleShape(size, random) for size in sample_sizes for random in (True, False)]
        self.samplings.want(samplings, now=2 * num_first)

    def find(self, exact: StepShape) -> StepShape | None:
        if exact.uncached_prefills or exact.wants_all:
            return None
        if exact.decode and exact.num_rows > self.row_sizes[-1]:
            return None
        if exact.decode and exact.num_samples == exact.num_rows:
            padded = decode_shape(fit(self.row_sizes, exact.num_rows))
        else:
            padded = mixed_shape(self.limits, fit(self.token_sizes, exact.num_tokens))
        return padded if padded in self.forwards else None

    def forward(self, shape: StepShape) -> Tensor:
        self.forwards.replay(shape)
        return self.runner.last_hidden[:0]  # the hidden states that are needed were kept in `last_hidden`

    def sample(self, exact: SampleShape) -> bool:
        padded = dataclasses.replace(exact, num_samples=fit(self.sample_sizes, exact.num_samples))
        if padded in self.samplings:
            self.samplings.replay(padded)
            return True
        if padded.masked:
            self.samplings.ask(padded)
        return False

    @property
    def num_recorded(self) -> int:
        return len(self.forwards.graphs) + len(self.samplings.graphs)

    def record_next(self) -> None:
        for graphs in (self.samplings, self.forwards):
            graphs.record_next()
