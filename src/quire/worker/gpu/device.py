"""A GPU, as the worker and its runner see it: kernels, recordings, whether it can be used, its memory for KV blocks.

`cpu/device.py` has the same names; `worker/device.py` says what they are. Errors here are for people: one sentence, and
what to do.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from quire.config import EngineConfig
from quire.errors import CapacityError, ConfigError, EngineError
from quire.ops.blocks.triton import copy_blocks
from quire.ops.elementwise.triton import gather_rows
from quire.ops.launch import INTERPRETED
from quire.ops.mask.triton import mask_logits
from quire.ops.sampling.triton import Scratch, sample
from quire.ops.step.triton import accept, correct_starts, place_samples, place_slots, place_tokens, scatter_segments
from quire.worker.cpu.device import kv_memory_bytes as host_memory_bytes
from quire.worker.failure import first_line
from quire.worker.gpu.graphs import Recordings
from quire.worker.gpu.masks import MaskStaging
from quire.worker.runner import Runner

__all__ = [
    "MaskStaging",
    "Recordings",
    "Scratch",
    "accept",
    "capacity",
    "copy_blocks",
    "correct_starts",
    "gather_rows",
    "known_lengths",
    "kv_memory_bytes",
    "mask_logits",
    "open",
    "place_samples",
    "place_slots",
    "place_tokens",
    "release",
    "sample",
    "scatter_segments",
]

GIB = 2**30
MIN_CAPABILITY = (8, 0)  # compute capability: the first with bfloat16 products
RESERVE_BYTES = 256 << 20  # for other processes on the GPU, the driver and fragmentation


def open(device: torch.device, idx: int = 0) -> None:
    """Sets GPU number `idx` up for this process, or raises an error that says why it cannot be used."""
    if device.type == "cpu":
        if not INTERPRETED:
            raise ConfigError("Triton's interpreter runs where TRITON_INTERPRET=1 is set: leave out interpret_triton")
        return
    try:
        torch.cuda.set_device(idx)
        torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError) as error:
        raise EngineError(
            f"the GPU cannot be used ({first_line(error)}): see nvidia-smi, or add --device cpu"
        ) from None
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        raise ConfigError(
            f"the {torch.cuda.get_device_name()} is older than what the kernels are made for (Ampere): add --device cpu"
        )
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextlib.contextmanager
def capacity(what: str) -> Iterator[None]:
    """Turns running out of memory while doing `what` into a CapacityError."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        raise CapacityError(
            f"the GPU's memory ended while {what}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free. "
            "Use a smaller model or dtype, lower --gpu-memory-utilization, --max-num-batched-tokens, --max-num-seqs or "
            "--max-model-len, or stop what else runs there (nvidia-smi shows it)"
        ) from None


def kv_memory_bytes(config: EngineConfig, make_runner: Callable[[], Runner]) -> int:
    """The engine's share of the GPU's memory, less what is in use, what a runner keeps and what a step needs."""
    if not torch.cuda.is_available():  # in Triton's interpreter
        return host_memory_bytes(config)
    before = torch.cuda.memory_allocated()
    runner = make_runner()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    runner.rehearse()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - kept
    runner.close()
    del runner
    release()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    # A step needs its peak once in torch's own cache and once more, at most, in the graphs' memory.
    needed = kept + 2 * peak
    utilization = config.cache.gpu_memory_utilization
    remaining = int(total * utilization) - used - needed - RESERVE_BYTES
    if remaining <= 0:
        raise CapacityError(
            f"no memory is left for KV blocks: of {total / GIB:.1f} GiB, {used / GIB:.1f} are taken and steps need "
            f"{needed / GIB:.1f}: raise --gpu-memory-utilization ({utilization}), "
            "lower --max-num-batched-tokens or --max-num-seqs, or use a smaller model"
        )
    return remaining


def known_lengths(lengths: torch.Tensor) -> None:
    """The host cannot know the rows' lengths without waiting for the device."""
    return None


def release() -> None:
    """Gives unused memory back to the GPU."""
    gc.collect()  # layers, caches and recorded graphs refer to each other
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # kept per stream, in memory of graphs that may no longer exist
        torch.cuda.empty_cache()
