"""Linear layers with what surrounds them in a block, in plain torch: the oracle of `ops/linear.py` and its fallback.

Called by quantization methods. Knows tensors only.

Shape letters: M rows, N outputs, K inputs, F half of a gated projection.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.ref.elementwise import rms_norm, silu_mul


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b, rounded to x's dtype and then given as `out_dtype`."""
    return functional.linear(x_MK, weight_NK, bias_N).to(out_dtype or x_MK.dtype)


def linear_silu_mul(x_MK: Tensor, weight_2F_K: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """silu(gate) * up; gate is the first half of the weight's rows, up the second."""
    return silu_mul(linear(x_MK, weight_2F_K, bias_2F))


def norm_linear(
    x_MK: Tensor, residual_MK: Tensor | None, norm_weight_K: Tensor, eps: float, weight_NK: Tensor, bias_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (y, residual): the residual stream after adding x, and the linear layer of its norm."""
    normed_MK, residual_MK = rms_norm(x_MK, norm_weight_K, eps, residual_MK)
    return linear(normed_MK, weight_NK, bias_N), residual_MK


def norm_linear_silu_mul(
    x_MK: Tensor, residual_MK: Tensor | None, norm_weight_K: Tensor, eps: float, weight_2F_K: Tensor, bias_2F: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`norm_linear` with the gated activation behind it."""
    normed_MK, residual_MK = rms_norm(x_MK, norm_weight_K, eps, residual_MK)
    return linear_silu_mul(normed_MK, weight_2F_K, bias_2F), residual_MK
