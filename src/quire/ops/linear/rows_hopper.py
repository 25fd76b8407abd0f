"""Linear layers of a few rows on Hopper, as fast as their weights can be read; twin: `ops/linear/reference.py`.

Called where `fits` says so, by `quant/plain/dense_gpu.py` with 16-bit weights, by `quant/kept/triton.py` with float8
weights and inputs that were rounded for them. Knows tensors only. Written in Gluon, where a program says itself what
Triton otherwise decides: the copy engine brings weights into shared memory, as many as fit there before the inputs
exist, and tensor cores take them from there, so that no register ever has a weight. Nothing interprets Gluon: tests
compile this kernel, and compare it with its twin where there is a card. `triton_rows.py` is for other cards, and for
layers too small for this.

Shape letters: M rows, N outputs, K inputs, F half of a gated projection, G groups of inputs that share a scale.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.ops.hopper import ask_for_inputs, ask_for_weights, described, new_barriers, wait_for_all_warps
from quire.ops.launch import INTERPRETED, TRITON_DTYPES, capability, options, pdl
from quire.ops.moe.activation import gated, linear_activation

BLOCK_N = 64  # outputs of a program: what tensor cores take at once
LINE_BYTES = 128  # of a row, which the copy engine and tensor cores take at once
LINES = 4  # of a step
RING_BYTES = 216 << 10  # of weights and inputs that a program has on their way: all of a multiprocessor's memory
MIN_OUTPUTS = 4096  # fewer are too few programs
FEW_INPUTS, FEW_ROWS = 1024, 8  # up to so many of both, `triton_rows.py` is faster
MAX_ROWS, MAX_FLOAT8_ROWS = 32, 64  # more are faster with cuBLAS
DTYPES = torch.bfloat16, torch.float16, torch.float8_e4m3fn
GROUP = 128  # inputs of float8 that share a scale, if not all do


class Scales(NamedTuple):
    """Of float8 weights, and of the inputs rounded for them."""

    inputs: Tensor  # float32 [M, 1] or [M, groups], those of neighbouring rows side by side
    outputs_N: Tensor | None = None  # float32
    blocks: Tensor | None = None  # float32, of GROUP x GROUP weights


def fits(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether this module can compute the product, and is faster than others."""
    if not x_MK.is_cuda or INTERPRETED or capability()[0] != 9:
        return False
    if x_MK.dtype != weight_NK.dtype or x_MK.dtype not in DTYPES:
        return False
    fewest, most = (1, MAX_FLOAT8_ROWS) if x_MK.itemsize == 1 else (2, MAX_ROWS)
    if not fewest <= len(x_MK) <= most or len(weight_NK) < MIN_OUTPUTS:
        return False
    if x_MK.itemsize == 2 and x_MK.shape[1] <= FEW_INPUTS and len(x_MK) <= FEW_ROWS:
        return False
    is_aligned = x_MK.shape[1] * x_MK.itemsize % 16 == 0  # as the copy engine wants it
    return is_aligned and x_MK.is_contiguous() and weight_NK.is_contiguous()


def linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T + b, rounded to `dtype`, by default x's, then converted to `out_dtype`."""
    dtype = dtype or x_MK.dtype
    y_MN = torch.empty(len(x_MK), len(weight_NK), dtype=out_dtype or dtype, device=x_MK.device)
    _launch(y_MN, x_MK, weight_NK, bias_N, scales, dtype, None)
    return y_MN


def linear_silu_mul(
    x_MK: Tensor,
    weight_2F_K: Tensor,
    bias_2F: Tensor | None = None,
    *,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """silu(gate) * up; gate is the first half of the weight's rows, up the second."""
    dtype = dtype or x_MK.dtype
    y_MF = torch.empty(len(x_MK), len(weight_2F_K) // 2, dtype=dtype, device=x_MK.device)
    _launch(y_MF, x_MK, weight_2F_K, bias_2F, scales, dtype, linear_activation(dtype))
    return y_MF


def _launch(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales | None,
    dtype: torch.dtype,
    activation: str | None,
) -> None:
    (M, N), K = y.shape, x.shape[1]
    block_m = max(8, triton.next_power_of_2(M))
    block_k = LINES * LINE_BYTES // x.itemsize
    slot_bytes = (BLOCK_N * (2 if activation else 1) + block_m) * block_k * x.itemsize
    blocks = scales.blocks if scales else None
    dependent = pdl(x)
    _few_rows_kernel[(triton.cdiv(N, BLOCK_N),)](
        y,
        described(x, block_m, block_k),
        described(weight, BLOCK_N, block_k),
        scales.inputs if scales else None,
        scales.outputs_N if scales else None,
        blocks,
        bias,
        M,
        N,
        K,
        blocks.shape[1] if blocks is not None else 1,
        scales.inputs.stride(1) if scales else 0,
        GROUP=GROUP,
        ACTIVATION=activation,
        DTYPE=TRITON_DTYPES[dtype],
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        LINE=LINE_BYTES // x.itemsize,
        STAGES=RING_BYTES // slot_bytes,
        PDL=dependent,
        num_warps=4,
        **options(dependent),
    )


@gluon.jit(do_not_specialize=["M", "N", "K", "G", "x_scales_stride"])
def _few_rows_kernel(
    y_ptr,
    x_desc,
    weight_desc,
    x_scales_ptr,
    outputs_ptr,
    blocks_ptr,
    bias_ptr,
    M,
    N,
    K,
    G,
    x_scales_stride,
    GROUP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    LINE: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program computes BLOCK_N outputs of every row, of a gated layer gates and ups, in steps of BLOCK_K inputs."""
    HALVES: gl.constexpr = 1 if ACTIVATION is None else 2
    IS_FLOAT8: gl.constexpr = weight_desc.dtype.primitive_bitwidth == 8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 if IS_FLOAT8 else 16])
    # As soon as the next kernel may start, it asks for weights, too. Those of 16 bits are many, and would delay this
    # kernel's own: it may start when all of these are on their way.
    if PDL and IS_FLOAT8:
        tl.extra.cuda.gdc_launch_dependents()
    num_steps = (K + BLOCK_K - 1) // BLOCK_K
    first_output = gl.program_id(0) * BLOCK_N
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * HALVES, BLOCK_N, BLOCK_K], weight_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    arrived = new_barriers(STAGES)
    for slot in gl.static_range(STAGES):
        wanted = slot < num_steps
        ask_for_weights(weight_desc, weights, x_desc, arrived, first_output, slot, slot, N, HALVES, BLOCK_K, wanted)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES):
        ask_for_inputs(x_desc, x, arrived, 0, slot, slot, BLOCK_K, slot < num_steps)

    m_M = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    up_sums = sums
    zeros = sums
    slot = 0
    phase = 0
    for step in range(num_steps):
        if PDL and not IS_FLOAT8:
            if step == gl.maximum(num_steps - STAGES, 0):
                tl.extra.cuda.gdc_launch_dependents()
        mbarrier.wait(arrived.index(slot), phase)
        x_MK = x.index(slot)
        if IS_FLOAT8:
            for line in gl.static_range(BLOCK_K // LINE):
                group = gl.minimum(step * (BLOCK_K // LINE) + line, G - 1)
                x_scales_M = _input_scales(x_scales_ptr, blocks_ptr, group, x_scales_stride, m_M, M)
                # Tensor cores add up float8 in few digits: not more than a line of them.
                part, up_part = _multiply(weights, slot, x_MK, line * LINE, LINE, zeros, zeros, HALVES, False)
                sums += _scaled(part, x_scales_M, blocks_ptr, first_output, group, G, GROUP)
                if HALVES == 2:
                    up_sums += _scaled(up_part, x_scales_M, blocks_ptr, N + first_output, group, G, GROUP)
        else:
            sums, up_sums = _multiply(weights, slot, x_MK, 0, BLOCK_K, sums, up_sums, HALVES, True)
        wait_for_all_warps()  # none reads this slot any more
        again = step + STAGES
        wanted = again < num_steps
        ask_for_weights(weight_desc, weights, x_desc, arrived, first_output, again, slot, N, HALVES, BLOCK_K, wanted)
        ask_for_inputs(x_desc, x, arrived, 0, again, slot, BLOCK_K, wanted)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    n_N = first_output + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    if x_scales_ptr is not None and blocks_ptr is None:
        x_scales_M = gl.load(x_scales_ptr + m_M, m_M < M, 0.0)
        sums *= x_scales_M[None, :]
        up_sums *= x_scales_M[None, :]
    y_NM = _finished(sums, outputs_ptr, bias_ptr, gl.minimum(n_N, N - 1))
    if HALVES == 2:
        y_NM = gated(y_NM, _finished(up_sums, outputs_ptr, bias_ptr, gl.minimum(n_N, N - 1) + N), ACTIVATION)
    inside_NM = (n_N < N)[:, None] & (m_M < M)[None, :]
    gl.store(y_ptr + m_M[None, :] * N + n_N[:, None], y_NM.to(DTYPE).to(y_ptr.dtype.element_ty), inside_NM)


@gluon.jit
def _multiply(
    weights,
    slot,
    x_MK,
    start: gl.constexpr,
    SIZE: gl.constexpr,
    sums,
    up_sums,
    HALVES: gl.constexpr,
    ADDS: gl.constexpr,
):
    """Products of some of a slot's inputs, or the sums and these; of a layer that is not gated, `up_sums` as it was."""
    x_KM = x_MK.slice(start, SIZE, dim=1).permute((1, 0))
    gate = weights.index(slot * HALVES).slice(start, SIZE, dim=1)
    sums = warpgroup_mma(gate, x_KM, sums, use_acc=ADDS, is_async=True)
    if HALVES == 2:
        up = weights.index(slot * HALVES + 1).slice(start, SIZE, dim=1)
        up_sums = warpgroup_mma(up, x_KM, up_sums, use_acc=ADDS, is_async=True)
        sums, up_sums = warpgroup_mma_wait(0, deps=(sums, up_sums))
    else:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    return sums, up_sums


@gluon.jit
def _input_scales(x_scales_ptr, blocks_ptr, group, x_scales_stride, m_M, M):
    """Of a group of inputs, if each group has its own; else nothing of use."""
    if blocks_ptr is None:
        return m_M.to(gl.float32)
    return gl.load(x_scales_ptr + group * x_scales_stride + m_M, m_M < M, 0.0)


@gluon.jit
def _scaled(part_NM, x_scales_M, blocks_ptr, first_output, group, G, GROUP: gl.constexpr):
    """Products of a group of inputs times the scales of inputs and weights, if the group has its own."""
    if blocks_ptr is not None:
        part_NM *= x_scales_M[None, :] * gl.load(blocks_ptr + first_output // GROUP * G + group)
    return part_NM


@gluon.jit
def _finished(sums_NM, outputs_ptr, bias_ptr, row_N):
    """What the sums are, with scales and biases of the weight's rows."""
    if outputs_ptr is not None:
        sums_NM *= gl.load(outputs_ptr + row_N)[:, None]
    if bias_ptr is not None:
        sums_NM += gl.load(bias_ptr + row_N).to(gl.float32)[:, None]
    return sums_NM
