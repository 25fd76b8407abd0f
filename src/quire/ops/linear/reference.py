"""Linear layers, also followed by a gated activation, in plain torch: the oracle of `ops/linear/triton.py`.

Called by tests and benchmarks. Knows tensors only.

Shape letters: M rows, N outputs, K inputs, F half of a gated projection.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.elementwise.reference import silu_mul


def linear(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x W^T + b, rounded to x's dtype, then converted to `out_dtype`."""
    return functional.linear(x_MK, weight_NK, bias_N).to(out_dtype or x_MK.dtype)


def linear_silu_mul(x_MK: Tensor, weight_2F_K: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """silu(gate) * up; gate is the first half of the weight's rows, up the second."""
    return silu_mul(linear(x_MK, weight_2F_K, bias_2F))
