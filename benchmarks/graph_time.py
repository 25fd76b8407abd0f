"""How long calls take on a GPU when a graph replays them, as a step does."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

REPLAYS = 7
WARM_UPS = 2


def graph_us(call: Callable[[Any], Any], inputs: list) -> float:
    """Microseconds of a call: the median of several replays of a graph with one call per input.

    With an input of its own for each call, the cache does not help.
    """
    call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in inputs:
            call(given)
    times = []
    for _ in range(WARM_UPS + REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return statistics.median(times[WARM_UPS:])
