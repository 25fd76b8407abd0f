"""Linear layers of 2 to 16 rows, nearly as fast as their weights can be read: steps that verify drafts, small batches.

Twin: `ops/linear/reference.py`. Called by quantization methods where `fits` says so, and `rows_hopper.py` does not take
the layer. Knows tensors only. Tensor cores multiply; rows are padded to 16, so that a row's sums do not depend on other
rows. The first weights are fetched into the cache before the input has been computed.

Shape letters: M rows, N outputs, K inputs, F half of a gated projection.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl

MAX_ROWS = 16
FEW_OUTPUTS, FEW_INPUTS = 4096, 1024


class Config(NamedTuple):
    """How one product is cut up."""

    block_n: int  # outputs of a program
    block_k: int  # inputs of a turn
    parts: int  # of these inputs, each summed up by warps of its own
    warps: int
    stages: int  # turns whose weights are on their way
    fetched: int = 0  # turns whose weights are fetched before the input is there


WIDE = Config(block_n=64, block_k=128, parts=1, warps=4, stages=5, fetched=2)
SHORT = Config(block_n=64, block_k=256, parts=1, warps=4, stages=3, fetched=4)
# Few outputs make few programs, so these are smaller, and hold as many bytes: 16 outputs are too few to give each warp
# some of them.
NARROW = Config(block_n=16, block_k=512, parts=4, warps=4, stages=4, fetched=2)


def fits(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether this module can compute the product, and is faster than torch."""
    if not x_MK.is_cuda or not 2 <= len(x_MK) <= MAX_ROWS or x_MK.dtype != weight_NK.dtype:
        return False
    is_aligned = x_MK.shape[1] % 8 == 0  # rows of 16 bytes, as they are copied
    return is_aligned and x_MK.itemsize == 2 and x_MK.is_contiguous() and weight_NK.is_contiguous()


def config(N: int, K: int, gated: bool = False) -> Config:
    """`N` counts outputs: half the weight's rows if gated. The same for any M."""
    if N > FEW_OUTPUTS or gated:
        return WIDE
    return SHORT if K <= FEW_INPUTS else NARROW


def linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    cut: Config | None = None,
) -> Tensor:
    """x W^T + b, rounded to x's dtype, then converted to `out_dtype`."""
    y_MN = torch.empty(len(x_MK), len(weight_NK), dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    _launch(x_MK, weight_NK, bias_N, y_MN, False, cut)
    return y_MN


def linear_silu_mul(
    x_MK: Tensor, weight_2F_K: Tensor, bias_2F: Tensor | None = None, *, cut: Config | None = None
) -> Tensor:
    """silu(gate) * up; gate is the first half of the weight's rows, up the second."""
    y_MF = torch.empty(len(x_MK), len(weight_2F_K) // 2, dtype=x_MK.dtype, device=x_MK.device)
    _launch(x_MK, weight_2F_K, bias_2F, y_MF, True, cut)
    return y_MF


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, gated: bool, cut: Config | None) -> None:
    (M, K), N = x.shape, y.shape[1]
    block_n, block_k, parts, warps, stages, fetched = cut or config(N, K, gated)
    dependent = pdl(x)
    _rows_kernel[(triton.cdiv(N, block_n),)](
        x,
        weight,
        bias,
        y,
        M,
        N,
        K,
        IS_EVEN=K % block_k == 0,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k // parts,
        PARTS=parts,
        STAGES=stages,
        FETCHED=fetched,
        GATED=gated,
        PDL=dependent,
        num_warps=warps,
        **options(dependent),
    )


@triton.jit
def _rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    IS_EVEN: tl.constexpr,  # the last turn has as many inputs as the others
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N outputs of every row, in turns of PARTS * BLOCK_K inputs.

    Tiles have the parts as their first dimension: [PARTS, BLOCK_N, BLOCK_K] times [PARTS, BLOCK_K, BLOCK_M]. A single
    part has none.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)  # past the end, the last row again
    m = tl.arange(0, BLOCK_M)
    if PARTS == 1:
        k = tl.arange(0, BLOCK_K)
        k_w, k_x = k[None, :], k[:, None]
        w_ptrs = weight_ptr + row[:, None] * K + k_w
        up_ptrs = weight_ptr + (row + N)[:, None] * K + k_w
        x_ptrs = x_ptr + m[None, :] * K + k_x
        has_row = (m < M)[None, :]
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        k = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        k_w, k_x = k[:, None, :], k[:, :, None]
        w_ptrs = weight_ptr + row[None, :, None] * K + k_w
        up_ptrs = weight_ptr + (row + N)[None, :, None] * K + k_w
        x_ptrs = x_ptr + m[None, None, :] * K + k_x
        has_row = (m < M)[None, None, :]
        sums = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    up_sums = sums
    if PDL and FETCHED:
        _fetch(weight_ptr + row[:, None] * K, FETCHED * PARTS * BLOCK_K, K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, K, PARTS * BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + start, mask=has_row if IS_EVEN else has_row & (start + k_x < K), other=0.0)
        sums = tl.dot(_load_weights(w_ptrs + start, start + k_w, K, IS_EVEN), x, sums)
        if GATED:
            up_sums = tl.dot(_load_weights(up_ptrs + start, start + k_w, K, IS_EVEN), x, up_sums)
    if PARTS > 1:
        sums, up_sums = tl.sum(sums, 0), tl.sum(up_sums, 0)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + row)[:, None]
    y = sums.to(x_ptr.dtype.element_ty)
    if GATED:
        if bias_ptr is not None:
            up_sums += tl.load(bias_ptr + row + N)[:, None]
        # Rounded at the same points as in the twin.
        gate = y.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(y.dtype)
        y = (gate.to(tl.float32) * up_sums.to(y.dtype).to(tl.float32)).to(y.dtype)
    is_wanted = (m < M)[None, :] & (n < N)[:, None]
    tl.store(y_ptr + m[None, :] * N + n[:, None], y.to(y_ptr.dtype.element_ty), mask=is_wanted)


@triton.jit
def _fetch(row_ptrs, COUNT: tl.constexpr, K):
    """Brings the first COUNT numbers of each row into the second-level cache, in lines of 64."""
    at = tl.minimum(tl.arange(0, COUNT // 64) * 64, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_ptrs + at[None, :]).to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_weights(ptrs, k, K, IS_EVEN: tl.constexpr):
    return tl.load(ptrs) if IS_EVEN else tl.load(ptrs, mask=k < K, other=0.0)
