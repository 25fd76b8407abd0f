"""Kernels as pure functions: `ref/` in plain torch (oracle and fallback), `cpu/` compiled for this machine.

`choose_kernels` is the one decision between them; `worker/build.py` attaches the result to layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Kernels(NamedTuple):
    """What layers call, by name; signatures are those of `ops/ref`."""

    rms_norm: Callable
    silu_mul: Callable
    embedding: Callable
    linear_method: str  # a file of quant/


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    from quire.ops.cpu import elementwise, linear
    from quire.ops.ref import elementwise as reference

    fast = elementwise if elementwise.supported(dtype) else reference
    packs = dtype == torch.bfloat16 and linear.supported()
    return Kernels(fast.rms_norm, fast.silu_mul, fast.embedding, "packed" if packs else "dense")
