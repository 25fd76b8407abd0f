"""How the Triton kernels are launched: what the device at hand can do, asked once.

Used by the kernels' wrappers. Programmatic dependent launch (PDL) lets a kernel start while the one before it is still
finishing. It may load weights at once, but waits (`gdc_wait`) before it touches anything that other kernels of the step
write or read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def pdl(x: Tensor) -> bool:
    """Whether kernels on this tensor can use programmatic dependent launch."""
    return x.is_cuda and capability() >= (9, 0)


def options(pdl: bool) -> dict[str, bool]:
    """Launch options. The interpreter and older devices accept none, so there they are empty."""
    return {"launch_pdl": True} if pdl else {}


@functools.cache
def capability() -> tuple[int, int]:
    """The compute capability of the card at hand; without a card, of the one that kernels are tuned on (H200)."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def has_little_shared_memory() -> bool:
    """Whether a program can have only 99 KiB, as on consumer cards; cards for data centers give it 163 or 227 KiB."""
    major, minor = capability()
    return major == 12 or (major == 8 and minor in (6, 9))


def num_multiprocessors(x: Tensor) -> int:
    return _num_multiprocessors(x.device.index or 0) if x.is_cuda else 1


@functools.cache
def _num_multiprocessors(device_idx: int) -> int:
    return torch.cuda.get_device_properties(device_idx).multi_processor_count


@triton.jit
def wait_turn(PDL: tl.constexpr):
    """Lets the next kernel start, then waits for the one before.

    For kernels with no weights to load while they wait.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
