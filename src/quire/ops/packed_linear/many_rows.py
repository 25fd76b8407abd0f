"""Linear layers of many rows with packed weights on GPUs: the library multiplies 8-bit numbers, or unpacked weights.

Called by `quant/kept/triton.py`; twin: `words.py`. Knows tensors only. Scales are multiplied in afterwards by a kernel
of our own: with a scale per row and output, the library's product is slower, and below a few hundred rows much slower.

Shape letters: M rows, N outputs, K inputs, G groups, W words (or bytes) of a row of codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quire.ops.launch import options, pdl, wait_turn
from quire.ops.packed_linear.decode import group_scale, power
from quire.ops.packed_linear.forms import FLOAT8
from quire.ops.packed_linear.rows import rescale
from quire.ops.packed_linear.words import GROUP_INPUTS, RUN, WordWeight, as_bytes

INT8_MIN_ROWS = 17  # the library multiplies no fewer


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
    block = min(1024, triton.next_power_of_2(w.k))
    dependent = pdl(out_NK)
    _unpack_kernel[w.n, triton.cdiv(w.k, block)](
        out_NK,
        *w.arguments(),
        RUN=RUN,
        **w.constants(),
        ZERO=w.zero,
        BLOCK=block,
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
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program unpacks BLOCK columns of one row; a word is loaded once for each of its planes, from the cache."""
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    wait_turn(PDL)
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    if PLANES == 1:
        code = tl.load(codes_ptr + n * W + k, mask=inside, other=0).to(tl.int32)
    else:
        words = tl.load(codes_ptr + n * W + k // (RUN * PLANES) * RUN + k % RUN, mask=inside, other=0)
        code = (words >> (k // RUN % PLANES * BITS)) & (2**BITS - 1)
    if KIND == "e4m3":
        values = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * power(120)
    elif KIND == "e2m1":
        values = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * power(126)
    elif KIND == "table":
        values = tl.load(table_ptr + code)
    elif KIND == "int8":
        values = (code ^ 128).to(tl.float32) - ZERO
    else:
        values = code.to(tl.float32) - ZERO
    place = n // ROWS * G + tl.minimum(k, K - 1) // GROUP
    if scales_ptr is not None:
        values *= group_scale(scales_ptr, scales_outer_ptr, place, SCALES_GROUPS)
    if mins_ptr is not None:
        values += group_scale(mins_ptr, mins_outer_ptr, place, MINS_GROUPS)
    if outer_ptr is not None:
        values *= tl.load(outer_ptr + n)
    tl.store(out_ptr + n * K + k, values.to(out_ptr.dtype.element_ty), mask=inside)
