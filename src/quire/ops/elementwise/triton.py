"""Norm, gated activation, lookups, and what q, k and v go through before attention; twin: `reference.py`.

In Triton. Called by `layers` and by the Triton attention backend. Rows must be contiguous; results are new and
contiguous. Knows nothing of models; of the cache only that a block lies in memory as [2, K, block_size, D], keys before
values, head after head.

Launch shapes come from the functions named `…_config` and depend on tensor shapes alone. Sums over a width are added in
the same order in every launch, so that a row's result does not depend on the other rows.

Shape letters: T tokens, D width (or head size), F half of a gated projection, H query heads, K key/value heads, S rows
picked, V vocabulary; in kernels C heads of a program, P pairs that rotate together, N elements of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, options, pdl
from quire.ops.packed_linear.words import as_bytes
from quire.ops.rounding.triton import empty_codes, round_groups

# The widest row that is held in registers; wider rows are read twice, in tiles of this size.
MAX_ROW = 8192
# Elements of each operand that a thread holds: one 16-byte load of bfloat16.
PER_THREAD = 8
SILU_MUL_TILE, SILU_MUL_WARPS = 1024, 4


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def rms_norm_config(width: int) -> tuple[int, int]:
    """(elements of a tile, warps)."""
    tile = min(triton.next_power_of_2(width), MAX_ROW)
    return tile, min(max(tile // (32 * PER_THREAD), 1), 16)


def gather_config(width: int) -> tuple[int, int]:
    return min(triton.next_power_of_2(width), 2048), 4


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the twin."""
    normed = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    total = x_TD if residual_TD is None else torch.empty_like(normed)
    kernel = _rms_norm_kernel if x_TD.shape[1] <= MAX_ROW else _wide_rms_norm_kernel
    _launch_rms_norm(kernel, normed, total, x_TD, residual_TD, weight_D, eps)
    return normed, total


def _launch_rms_norm(
    kernel: Any,
    normed: Tensor,
    total_TD: Tensor,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    **rounding: Any,
) -> None:
    num_rows, width = x_TD.shape
    if not num_rows:
        return
    tile, num_warps = rms_norm_config(width)
    kernel[(num_rows,)](
        normed,
        total_TD,
        x_TD,
        residual_TD,
        weight_D,
        eps,
        x_TD.stride(0),
        0 if residual_TD is None else residual_TD.stride(0),
        D=width,
        N=tile,
        PDL=pdl(x_TD),
        **rounding,
        num_warps=num_warps,
        **options(pdl(x_TD)),
    )


def fits_rounded_rms_norm(width: int) -> bool:
    return width <= MAX_ROW


def rounded_rms_norm(
    rounds: str,
    input_scale: float | None,
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    residual_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rms_norm`, with the normed rows as codes and scales (`round_rows` in `ops/packed_linear`): (…, …, total)."""
    num_rows, width = x_TD.shape
    codes, scales, group = empty_codes(num_rows, width, rounds, x_TD.device)
    total = x_TD if residual_TD is None else torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    rounding = dict(
        scales_ptr=scales,
        input_scale=input_scale if rounds == "float8 static" else None,
        scales_stride=scales.stride(1),
        GROUP=group,
        IS_INT8=codes.dtype == torch.int8,
        ON_CARD=not INTERPRETED,
    )
    _launch_rms_norm(_rms_norm_kernel, as_bytes(codes), total, x_TD, residual_TD, weight_D, eps, **rounding)
    return codes, scales, total


@triton.jit
def _rms_norm_kernel(
    normed_ptr,
    total_ptr,
    x_ptr,
    added_ptr,
    weight_ptr,
    eps,
    x_stride,
    added_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
    scales_ptr=None,
    input_scale=None,
    scales_stride=0,
    GROUP: tl.constexpr = None,
    IS_INT8: tl.constexpr = False,
    ON_CARD: tl.constexpr = False,
):
    """With `scales_ptr`, normed rows are rounded, and stored as codes: GROUP neighbours with a scale of their own."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i_N = tl.arange(0, N)
    inside = i_N < D
    weight_N = tl.load(weight_ptr + i_N, inside, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_N = tl.load(x_ptr + row * x_stride + i_N, inside, 0.0)
    if added_ptr is not None:
        x_N = _sum(x_N, tl.load(added_ptr + row * added_stride + i_N, inside, 0.0))
        tl.store(total_ptr + row * D + i_N, x_N, inside)
    wide_N = x_N.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide_N * wide_N, 0) / D + eps)
    normed_N = scaled(wide_N, inverse, weight_N, x_N.dtype)
    if scales_ptr is None:
        tl.store(normed_ptr + row * D + i_N, normed_N, inside)
    else:
        codes_N, scales_G = round_groups(normed_N.to(tl.float32), input_scale, GROUP, IS_INT8, ON_CARD)
        tl.store(normed_ptr + row * D + i_N, codes_N, inside)
        g_G = tl.arange(0, N // GROUP)
        tl.store(scales_ptr + g_G * scales_stride + row, scales_G, g_G * GROUP < D)


@triton.jit
def _wide_rms_norm_kernel(
    normed_ptr,
    total_ptr,
    x_ptr,
    added_ptr,
    weight_ptr,
    eps,
    x_stride,
    added_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row in tiles, read twice. The second time it adds the residual again rather than read back the sums."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    squares_N = tl.zeros((N,), tl.float32)
    for start in range(0, D, N):
        i_N = start + tl.arange(0, N)
        x_N = tl.load(x_ptr + row * x_stride + i_N, i_N < D, 0.0)
        if added_ptr is not None:
            x_N = _sum(x_N, tl.load(added_ptr + row * added_stride + i_N, i_N < D, 0.0))
            tl.store(total_ptr + row * D + i_N, x_N, i_N < D)
        squares_N += x_N.to(tl.float32) * x_N.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(squares_N, 0) / D + eps)
    for start in range(0, D, N):
        i_N = start + tl.arange(0, N)
        x_N = tl.load(x_ptr + row * x_stride + i_N, i_N < D, 0.0)
        if added_ptr is not None:
            x_N = _sum(x_N, tl.load(added_ptr + row * added_stride + i_N, i_N < D, 0.0))
        weight_N = tl.load(weight_ptr + i_N, i_N < D, 0.0)
        tl.store(normed_ptr + row * D + i_N, scaled(x_N.to(tl.float32), inverse, weight_N, x_N.dtype), i_N < D)


@triton.jit
def _sum(a, b):
    """Rounded to their type, so that the norm is of exactly what the residual stream holds."""
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def scaled(wide, inverse, weight, DTYPE: tl.constexpr):
    """Rounded before the product with the weight, and after it: see the twin."""
    return ((wide * inverse).to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE)


# ---- the end of a stage ----


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """By torch, which a graph records like any other kernel."""
    return x_TD + y_TD


# ---- gated activation ----


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where a row is all of gate and then all of up."""
    num_rows, width = x_T2F.shape[0], x_T2F.shape[1] // 2
    out = x_T2F.new_empty(num_rows, width)
    if num_rows:
        _silu_mul_kernel[num_rows, triton.cdiv(width, SILU_MUL_TILE)](
            out,
            x_T2F,
            x_T2F.stride(0),
            F=width,
            N=SILU_MUL_TILE,
            PDL=pdl(x_T2F),
            num_warps=SILU_MUL_WARPS,
            **options(pdl(x_T2F)),
        )
    return out


@triton.jit
def _silu_mul_kernel(out_ptr, x_ptr, x_stride, F: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i_N = tl.program_id(1) * N + tl.arange(0, N)
    gate_ptr = x_ptr + row * x_stride
    gate = tl.load(gate_ptr + i_N, i_N < F, 0.0).to(tl.float32)
    up = tl.load(gate_ptr + F + i_N, i_N < F, 0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * F + i_N, silu.to(tl.float32) * up, i_N < F)


# ---- lookups ----


def embedding(token_ids_T: Tensor, weight_VD: Tensor, first: int | None = None) -> Tensor:
    """As the twin."""
    return gather_rows(weight_VD, token_ids_T, first=first)


def gather_rows(x_TD: Tensor, idx_S: Tensor, out: Tensor | None = None, first: int | None = None) -> Tensor:
    """The rows of x that the indices name, [S, D]; into `out`, contiguous, if it is given. `first`: as `embedding`."""
    num_rows, width = idx_S.shape[0], x_TD.shape[1]
    out = x_TD.new_empty(num_rows, width) if out is None else out
    tile, num_warps = gather_config(width)
    if num_rows:
        _gather_kernel[num_rows, triton.cdiv(width, tile)](
            out,
            x_TD,
            idx_S,
            x_TD.stride(0),
            first or 0,
            len(x_TD),
            SOME=first is not None,
            D=width,
            N=tile,
            PDL=pdl(x_TD),
            num_warps=num_warps,
            **options(pdl(x_TD)),
        )
    return out


@triton.jit
def _gather_kernel(
    out_ptr,
    x_ptr,
    idx_ptr,
    x_stride,
    first,
    num_rows,
    SOME: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i_N = tl.program_id(1) * N + tl.arange(0, N)
    from_row = tl.load(idx_ptr + row).to(tl.int64)
    mask_N = i_N < D
    if SOME:  # x has only some of the rows: others are zero
        from_row -= first
        mask_N = mask_N & (from_row >= 0) & (from_row < num_rows)
    values_N = tl.load(x_ptr + from_row * x_stride + i_N, mask_N, 0.0)
    tl.store(out_ptr + row * D + i_N, values_N, i_N < D)


# ---- before attention ----
