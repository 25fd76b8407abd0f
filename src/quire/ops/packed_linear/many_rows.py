"""Linear layers of many rows with packed weights on GPUs: the library multiplies 8-bit numbers, or unpacked weights.

Called by `quant/kept/triton.py`; twin: `words.py`. Knows tensors only. Scales are multiplied in afterwards by a kernel
of our own, below a few hundred rows: the library's product with a scale per row and output is slower there.

Shape letters: M rows, N outputs, K inputs, G groups, W words (or bytes) of a row of codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quire.ops.launch import options, pdl, wait_turn
from quire.ops.packed_linear.decode import group_scale, load_row, pair_minimum, pair_scale, plane_values
from quire.ops.packed_linear.rows import rescale
from quire.ops.packed_linear.words import WordWeight, as_bytes
from quire.ops.rounding.reference import FLOAT8, GROUP_INPUTS

INT8_MIN_ROWS = 17  # the library multiplies no fewer
# From here on the library's product of float8 with scales of rows and outputs is faster than scales multiplied later.
MIN_SCALED_ROWS = 512
UNPACKED_WORDS = 256  # of each of a program's rows, in fours; the fewer of shorter rows, the more rows


def linear(
    x_MK: Tensor,
    w: WordWeight,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `triton.linear`."""
    dtype = dtype or x_MK.dtype
    if scales is None:
        ordered_MK = x_MK if w.order_K is None else x_MK.index_select(1, w.order_K)
        y_MN = functional.linear(ordered_MK, unpack(w, x_MK.dtype), bias_N)
        return y_MN if out_dtype is None else y_MN.to(out_dtype)
    can_scale = scales.is_cuda and dtype == torch.bfloat16 and len(x_MK) >= MIN_SCALED_ROWS
    if w.one is not None and w.outer_N is not None and can_scale:
        y_MN = torch._scaled_mm(x_MK, w.codes.T, scales.contiguous(), w.outer_N[None], bias_N, out_dtype=dtype)
        return y_MN if out_dtype is None else y_MN.to(out_dtype)
    sums_MN = _library_product(x_MK, scales, w)
    y_MN = torch.empty(sums_MN.shape, dtype=out_dtype or dtype, device=x_MK.device)
    rescale(y_MN, sums_MN, scales if scales.shape[1] == 1 else None, w.outer_N, bias_N, dtype)
    return y_MN


def _library_product(codes_MK: Tensor, scales: Tensor, w: WordWeight) -> Tensor:
    """Without the scales that `rescale` will multiply in."""
    if not codes_MK.is_cuda:  # in the interpreter
        values_NK = w.codes_NK().float() - (w.zero if w.kind == "int8" else 0)
        if w.scales_NG is None:
            return codes_MK.float() @ values_NK.T
        repeated = scales.repeat_interleave(GROUP_INPUTS, 1)[:, : w.k]
        return (codes_MK.float() * repeated) @ w.numbers().T
    if w.kind == "int8":
        return _int8_product(codes_MK, w)
    if w.one is not None:
        return torch._scaled_mm(codes_MK, w.codes.T, w.one, w.one, out_dtype=torch.bfloat16)
    return _block_product(codes_MK, scales, w)


def _int8_product(codes_MK: Tensor, w: WordWeight) -> Tensor:
    """int32 [M, N]"""
    M = len(codes_MK)
    if M < INT8_MIN_ROWS:
        codes_MK = functional.pad(codes_MK, (0, 0, 0, INT8_MIN_ROWS - M))
    signed_NK = w.codes.view(torch.int8)
    return torch._int_mm(codes_MK, signed_NK.T)[:M]


def _block_product(codes_MK: Tensor, scales_MG: Tensor, w: WordWeight) -> Tensor:
    """The library wants rows in fours, and scales of neighbouring rows side by side."""
    M = len(codes_MK)
    padding = -M % 4
    if padding:
        codes_MK = functional.pad(as_bytes(codes_MK), (0, 0, 0, padding)).view(FLOAT8)
        scales_MG = functional.pad(scales_MG, (0, 0, 0, padding), value=1.0)
    block_scales = w.scales_NG
    if block_scales is None:
        raise ValueError("a weight without scales of blocks")
    columns_MG = scales_MG.T.contiguous().T
    return torch._scaled_mm(codes_MK, w.codes.T, columns_MG, block_scales.T, out_dtype=torch.bfloat16)[:M]


# ---- unpacking -------------------------------------------------------------------------------------------------------


def unpack(w: WordWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K], its columns in their own order."""
    out_NK = torch.empty(w.n, w.k, dtype=dtype, device=w.codes.device)
    w = w.in_words
    num_words = w.codes.shape[1]
    block_w = min(UNPACKED_WORDS, triton.next_power_of_2(num_words))
    block_n = UNPACKED_WORDS // block_w * 4
    dependent = pdl(out_NK)
    _unpack_kernel[triton.cdiv(num_words, block_w), triton.cdiv(w.n, block_n)](
        out_NK,
        *w.arguments(),
        w.n,
        **w.constants(),
        SETS=w.run * w.planes // w.set_inputs,
        ZERO=w.zero,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        PDL=dependent,
        num_warps=4,
        **options(dependent),
    )
    return out_NK


@triton.jit
def _unpack_kernel(
    out_ptr,
    codes_ptr,
    scales_ptr,
    scales_outer_ptr,
    mins_ptr,
    mins_outer_ptr,
    outer_ptr,
    table_ptr,
    N,
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    PAIR: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program unpacks BLOCK_W words of BLOCK_N outputs, plane by plane; a lane of four words has the same scales."""
    LANE: tl.constexpr = 4
    R: tl.constexpr = BLOCK_W // LANE
    wait_turn(PDL)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_N1 = tl.minimum(n_N, N - 1).to(tl.int64)[:, None]
    w_1W = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    lane_1R = tl.program_id(0) * R + tl.arange(0, R)[None, :]
    words = load_row(codes_ptr + row_N1 * W, w_1W, W, BLOCK_W)
    outer_N1 = tl.full((BLOCK_N, 1), 1.0, tl.float32)
    if outer_ptr is not None:
        outer_N1 = tl.load(outer_ptr + row_N1)
    for set in tl.static_range(SETS):
        input_1R = lane_1R * LANE // RUN * (RUN * PLANES) + set * (RUN * PLANES // SETS)
        place_NR = row_N1 // ROWS * G + tl.minimum(input_1R, K - 1) // GROUP
        scale_NR = outer_N1 + tl.zeros((BLOCK_N, R), tl.float32)
        if PAIR is not None:
            pairs_NR = tl.load(scales_ptr + place_NR)
            scale_NR *= pair_scale(pairs_NR, PAIR)
        elif scales_ptr is not None:
            scale_NR *= group_scale(scales_ptr, scales_outer_ptr, place_NR, SCALES_GROUPS)
        shift_NR = -ZERO * scale_NR
        if PAIR is not None:
            shift_NR += outer_N1 * pair_minimum(pairs_NR, pair_scale(pairs_NR, PAIR), PAIR)
        if mins_ptr is not None:
            shift_NR += outer_N1 * group_scale(mins_ptr, mins_outer_ptr, place_NR, MINS_GROUPS)
        for plane in tl.static_range(set * (PLANES // SETS), (set + 1) * (PLANES // SETS)):
            values = tl.reshape(plane_values(words, table_ptr, plane, KIND, BITS), (BLOCK_N, R, LANE))
            values = values * scale_NR[:, :, None] + shift_NR[:, :, None]
            k_1W = w_1W // RUN * (RUN * PLANES) + plane * RUN + w_1W % RUN
            inside = (n_N < N)[:, None] & (k_1W < K)
            out = tl.reshape(values, (BLOCK_N, BLOCK_W)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row_N1 * K + k_1W, out, mask=inside)
