"""Kernels as pure functions: in Triton, for GPUs; `ref/` in plain torch (oracle and fallback); `cpu/` compiled for this machine.

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
    logits_dtype: torch.dtype | None = torch.float32  # None: the model's own, for samplers that widen as they read


def choose_kernels(dtype: torch.dtype, triton: bool) -> Kernels:
    """`triton`: for a GPU (or, in tests, for Triton's interpreter)."""
    if triton:
        from quire.ops import elementwise as kernels

        return Kernels(kernels.rms_norm, kernels.silu_mul, kernels.embedding, "dense_gpu", None)
    from quire.ops.cpu import elementwise, linear
    from quire.ops.ref import elementwise as reference

    fast = elementwise if elementwise.supported(dtype) else reference
    packs = dtype == torch.bfloat16 and linear.supported()
    return Kernels(fast.rms_norm, fast.silu_mul, fast.embedding, "packed" if packs else "dense")
