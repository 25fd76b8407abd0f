"""The GPU itself: whether it can be used, and how much of its memory KV blocks may take.

Called by the worker. Errors here are told to people: one sentence, and what to do.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from quire.config import EngineConfig
from quire.errors import CapacityError, ConfigError, EngineError
from quire.ops.launch import INTERPRETED

GIB = 2**30
RESERVE_BYTES = 256 << 20  # for what others on the card, the driver and fragmentation take


def open(device: torch.device) -> None:
    """Makes the device this process's own, or says why it cannot be used."""
    if device.type == "cpu":
        if not INTERPRETED:
            raise ConfigError("--attention-backend triton needs an NVIDIA GPU: leave it out")
        return
    try:
        torch.cuda.set_device(0)
        torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"the GPU cannot be used ({_first_line(error)}): see nvidia-smi, or add --device cpu") from None
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextlib.contextmanager
def capacity(what: str) -> Iterator[None]:
    """Running out of memory while doing `what` becomes a sentence."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        raise CapacityError(
            f"the GPU's memory ended while {what}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free. Use a smaller model or dtype, "
            "lower --gpu-memory-utilization or --max-num-batched-tokens, or stop what else runs there (nvidia-smi shows it)"
        ) from None


def kv_memory_bytes(config: EngineConfig, rehearse: Callable[[], None]) -> int:
    """The share of the card that is the engine's, less what is taken and what a step takes at most (`rehearse` runs the largest)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rehearse()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # A step takes its peak once in torch's own cache and once more, at most, in the graphs' memory.
    room = int(total * config.cache.gpu_memory_utilization) - (total - free) - 2 * peak - RESERVE_BYTES
    if room <= 0:
        raise CapacityError(
            f"no memory is left for KV blocks: of {total / GIB:.1f} GiB, {(total - free) / GIB:.1f} are taken and a step needs "
            f"{2 * peak / GIB:.1f}: raise --gpu-memory-utilization ({config.cache.gpu_memory_utilization}), "
            "lower --max-num-batched-tokens, or use a smaller model"
        )
    return room


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
