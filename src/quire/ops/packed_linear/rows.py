"""What rows go through before and after products with packed weights on GPUs, in Triton.

Called by `quant/kept/triton.py`, `tiles.py` and `many_rows.py`; twin of the rounding: `words.py`. Knows tensors only.

Shape letters: M rows, N outputs, K inputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.elementwise import triton as elementwise
from quire.ops.launch import INTERPRETED, TRITON_DTYPES, options, pdl, wait_turn
from quire.ops.moe.activation import gated, linear_activation
from quire.ops.packed_linear.words import WordWeight, as_bytes
from quire.ops.rounding.triton import empty_codes, round_groups

# ---- rounding activations --------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """Inputs, rounded as a weight wants them."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype  # what they were before


def round_inputs(x_MK: Tensor, w: WordWeight) -> tuple[Tensor, Tensor | None]:
    """The inputs as the weight wants them, and their scales if they are rounded."""
    return (x_MK, None) if w.rounds is None else round_rows(x_MK, w.rounds, w.input_scale)


def rounded_rms_norm(
    w: WordWeight, x_MK: Tensor, weight_K: Tensor, eps: float, residual_MK: Tensor | None = None
) -> tuple[Rounded, Tensor]:
    """(norm(x + residual) rounded for `w`, x + residual)"""
    codes, scales, total_MK = elementwise.rounded_rms_norm(
        w.rounds or "", w.input_scale, x_MK, weight_K, eps, residual_MK
    )
    return Rounded(codes, scales, x_MK.dtype), total_MK


def rounded_silu_mul(w: WordWeight, x_M2K: Tensor) -> Rounded:
    """silu(gate) * up, where a row is all of gate and then all of up; in the model's dtype, then rounded for `w`."""
    return Rounded(*round_rows(x_M2K, w.rounds or "", w.input_scale, is_gated=True), x_M2K.dtype)


def round_rows(
    x_MK: Tensor, rounds: str, input_scale: float | None = None, *, is_gated: bool = False
) -> tuple[Tensor, Tensor]:
    """As the twin: codes, and their scales [M, 1] or [M, groups], those of neighbouring rows side by side."""
    M, K = x_MK.shape
    if is_gated:
        K //= 2
    codes, scales, block = empty_codes(M, K, rounds, x_MK.device)
    dependent = pdl(x_MK)
    _round_kernel[M, scales.shape[1]](
        as_bytes(codes),
        scales,
        x_MK,
        input_scale if rounds == "float8 static" else None,
        x_MK.stride(0),
        scales.stride(1),
        K=K,
        ACTIVATION=linear_activation(x_MK.dtype) if is_gated else None,
        IS_INT8=codes.dtype == torch.int8,
        BLOCK=block,
        ON_CARD=not INTERPRETED,
        PDL=dependent,
        num_warps=min(16, max(1, block // 512)),
        **options(dependent),
    )
    return codes, scales


@triton.jit
def _round_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    input_scale,
    x_stride,
    scales_stride,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program rounds a row, or a group of it."""
    wait_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x_ptr + row * x_stride + K + k, mask=k < K, other=0.0).to(tl.float32)
        x = gated(x, up, ACTIVATION).to(x_ptr.dtype.element_ty).to(tl.float32)
    codes, scales_1 = round_groups(x, input_scale, BLOCK, IS_INT8, ON_CARD)
    tl.store(codes_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + (tl.program_id(1) + tl.arange(0, 1)) * scales_stride + row, scales_1)


# ---- scales after the product ----------------------------------------------------------------------------------------


def rescale(
    y_MN: Tensor,
    sums_MN: Tensor,
    scales_M: Tensor | None,
    outer_N: Tensor | None,
    bias_N: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """y = sums * scales of rows * scales of outputs + bias, rounded to `dtype`, then converted to y's.

    Sums may be of parts, [P, M, N], which are added up first.
    """
    M, N = y_MN.shape
    block = min(1024, triton.next_power_of_2(N))
    dependent = pdl(y_MN)
    _rescale_kernel[M, triton.cdiv(N, block)](
        y_MN,
        sums_MN,
        scales_M,
        outer_N,
        bias_N,
        M,
        N=N,
        PARTS=sums_MN.shape[0] if sums_MN.dim() == 3 else 1,
        DTYPE=TRITON_DTYPES[dtype],
        BLOCK=block,
        PDL=dependent,
        num_warps=4,
        **options(dependent),
    )


@triton.jit
def _rescale_kernel(
    y_ptr,
    sums_ptr,
    scales_ptr,
    outer_ptr,
    bias_ptr,
    M,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    y = tl.load(sums_ptr + row * N + n, mask=inside, other=0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        y += tl.load(sums_ptr + (part * M + row) * N + n, mask=inside, other=0.0)
    if outer_ptr is not None:
        y *= tl.load(outer_ptr + n, mask=inside, other=0.0)
    if scales_ptr is not None:
        y *= tl.load(scales_ptr + row)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + n, y.to(DTYPE).to(y_ptr.dtype.element_ty), mask=inside)
