"""How Triton kernels of this folder are launched: what the device at hand can do, asked once.

Used by the kernels' wrappers. Programmatic dependent launch (PDL) lets a kernel start while the one before it drains: it may
load weights at once, and waits (`gdc_wait`) before it touches what others of the step write or read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret


def pdl(x: Tensor) -> bool:
    """Whether kernels on this tensor can be launched dependently."""
    return x.is_cuda and capability() >= (9, 0)


def options(pdl: bool) -> dict[str, bool]:
    """Launch options; the interpreter and older devices know none of them."""
    return {"launch_pdl": True} if pdl else {}


@functools.cache
def capability() -> tuple[int, int]:
    """Of the card at hand; where there is none, of the one that kernels are tuned on."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def has_little_shared_memory() -> bool:
    """Consumer cards give a program 99 KiB, those of data centers 163 or 227."""
    major, minor = capability()
    return major == 12 or (major == 8 and minor in (6, 9))


def num_multiprocessors(x: Tensor) -> int:
    return _num_multiprocessors(x.device.index or 0) if x.is_cuda else 1


@functools.cache
def _num_multiprocessors(device_idx: int) -> int:
    return torch.cuda.get_device_properties(device_idx).multi_processor_count


@triton.jit
def wait_turn(PDL: tl.constexpr):
    """Lets the next kernel start and waits for the one before: how a kernel begins that has no weights to load meanwhile."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
