"""What rows go through before and after products with packed weights on GPUs, in Triton.

Called by `quant/kept/triton.py`, `tiles.py` and `many_rows.py`; twin of the rounding: `words.py`. Knows tensors only.

Shape letters: M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, options, pdl, wait_turn
from quire.ops.packed_linear.forms import FLOAT8
from quire.ops.packed_linear.rounding import TINY_INPUT, to_code
from quire.ops.packed_linear.words import GROUP_INPUTS, WordWeight, as_bytes

ROWS_PAST_END = 128


# ---- rounding activations --------------------------------------------------------------------------------------------


def round_inputs(x_MK: Tensor, w: WordWeight) -> tuple[Tensor, Tensor | None]:
    """The inputs as the weight wants them, and their scales if they are rounded."""
    return (x_MK, None) if w.rounds is None else round_rows(x_MK, w.rounds, w.input_scale)


def round_rows(x_MK: Tensor, rounds: str, input_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """As the twin: codes, and their scales [M, 1] or [M, groups], those of neighbouring rows side by side."""
    M, K = x_MK.shape
    is_int8 = rounds == "int8 token"
    codes = torch.empty(M, K, dtype=torch.int8 if is_int8 else FLOAT8, device=x_MK.device)
    block = GROUP_INPUTS if rounds == "float8 group" else triton.next_power_of_2(K)
    num_groups = triton.cdiv(K, block)
    scales = by_column(M, num_groups, x_MK.device)
    dependent = pdl(x_MK)
    _round_kernel[M, num_groups](
        as_bytes(codes),
        scales,
        x_MK,
        input_scale if rounds == "float8 static" else None,
        x_MK.stride(0),
        scales.stride(1),
        K=K,
        IS_INT8=is_int8,
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
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program rounds a row, or a group of it."""
    LARGEST: tl.constexpr = 127.0 if IS_INT8 else 448.0
    wait_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if input_scale is None:
        largest = tl.maximum(tl.max(tl.abs(x), 0), TINY_INPUT)
    else:
        largest = input_scale * LARGEST
    code = to_code(x * tl.div_rn(LARGEST, largest), "int8" if IS_INT8 else "e4m3", ON_CARD)
    tl.store(codes_ptr + row * K + k, code if IS_INT8 else code.to(tl.uint8, bitcast=True), mask=k < K)
    tl.store(scales_ptr + tl.program_id(1) * scales_stride + row, tl.div_rn(largest, LARGEST))


# ---- sums of inputs --------------------------------------------------------------------------------------------------


def sum_sets(x_MK: Tensor, set_inputs: int, run_inputs: int) -> Tensor:
    """float32 [M, sets]: the sum of every `set_inputs` neighbouring inputs, a power of two; zero past the last ones,
    up to a multiple of `run_inputs`. As scales are, sums of neighbouring rows are side by side."""
    M, K = x_MK.shape
    num_sets = triton.cdiv(K, run_inputs) * run_inputs // set_inputs
    sums = by_column(M, num_sets, x_MK.device)
    block = max(set_inputs, min(2048, triton.next_power_of_2(K)))
    dependent = pdl(x_MK)
    _sums_kernel[M, triton.cdiv(num_sets * set_inputs, block)](
        sums,
        x_MK,
        sums.stride(1),
        K=K,
        NUM_SETS=num_sets,
        SET=set_inputs,
        BLOCK=block,
        PDL=dependent,
        num_warps=4,
        **options(dependent),
    )
    return sums


def by_column(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """A new float32 tensor, column after column; behind the last one is room to read on to the end of a tile."""
    memory = torch.empty(num_rows * num_columns + ROWS_PAST_END, dtype=torch.float32, device=device)
    return memory[: num_rows * num_columns].view(num_columns, num_rows).T


@triton.jit
def _sums_kernel(
    sums_ptr,
    x_ptr,
    sums_stride,
    K: tl.constexpr,
    NUM_SETS: tl.constexpr,
    SET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    sums = tl.sum(tl.reshape(x, (BLOCK // SET, SET)), 1)
    place = tl.program_id(1) * (BLOCK // SET) + tl.arange(0, BLOCK // SET)
    tl.store(sums_ptr + place * sums_stride + row, sums, mask=place < NUM_SETS)


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
        IS_FLOAT32=dtype == torch.float32,
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
    IS_FLOAT32: tl.constexpr,
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
    if not IS_FLOAT32:
        y = y.to(tl.bfloat16)
    tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), mask=inside)
