"""Linear layers of one row, as fast as their weights can be read; twin: `ops/linear/reference.py`.

Called by quantization methods where `fits` says so; `triton_rows.py` is for a few rows more. Knows tensors only. Every
program starts to load its share of the weights before its input has been computed, so that with dependent launch memory
is never idle between two layers.

Shape letters: N outputs, K inputs, F half of a gated projection.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl

MULTIPROCESSORS = 132
TILE_BYTES = 16 << 10  # of weights that a program has in flight: with 4 warps, 32 registers per thread


class Config(NamedTuple):
    """How one product is cut up."""

    block_n: int  # outputs of a program
    block_k: int  # inputs of a chunk; a program's chunks are all in flight at once
    warps: int


def fits(x_1K: Tensor, weight_NK: Tensor) -> bool:
    """Whether this module can compute the product, and is faster than torch."""
    if not x_1K.is_cuda or len(x_1K) != 1 or x_1K.dtype != weight_NK.dtype:
        return False
    return x_1K.is_contiguous() and weight_NK.is_contiguous()


def config(N: int, K: int, dtype: torch.dtype, gated: bool = False) -> Config:
    """`N` counts outputs: half the weight's rows if gated."""
    row_bytes = K * dtype.itemsize * (2 if gated else 1)
    warps = min(16, max(4, triton.next_power_of_2(row_bytes * 4 // TILE_BYTES)))
    block_k = min(triton.next_power_of_2(K), warps * 32 * 16 // dtype.itemsize)  # 16 bytes per thread
    block_n = max(1, min(TILE_BYTES // row_bytes, N // MULTIPROCESSORS))
    return Config(1 << block_n.bit_length() - 1, block_k, warps)


def linear(
    x_1K: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    cut: Config | None = None,
) -> Tensor:
    """x W^T + b, rounded to x's dtype, then converted to `out_dtype`."""
    y_1N = torch.empty(1, len(weight_NK), dtype=out_dtype or x_1K.dtype, device=x_1K.device)
    _launch(x_1K, weight_NK, bias_N, y_1N, False, cut)
    return y_1N


def linear_silu_mul(
    x_1K: Tensor, weight_2F_K: Tensor, bias_2F: Tensor | None = None, *, cut: Config | None = None
) -> Tensor:
    """silu(gate) * up; gate is the first half of the weight's rows, up the second."""
    y_1F = torch.empty(1, len(weight_2F_K) // 2, dtype=x_1K.dtype, device=x_1K.device)
    _launch(x_1K, weight_2F_K, bias_2F, y_1F, True, cut)
    return y_1F


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, gated: bool, cut: Config | None) -> None:
    K, N = x.shape[1], y.shape[1]
    block_n, block_k, warps = cut or config(N, K, x.dtype, gated)
    dependent = pdl(x)
    _linear_kernel[(triton.cdiv(N, block_n),)](
        x,
        weight,
        bias,
        y,
        N,
        K=K,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATED=gated,
        PDL=dependent,
        num_warps=warps,
        **options(dependent),
    )


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N outputs. It holds so many rows of the weight (twice, if gated)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end it loads the last row again: no mask is needed, so there are only loads between a program's start and
    # its wait.
    row = tl.minimum(n, N - 1).to(tl.int64)
    weights = _load_chunks(weight_ptr + row[:, None] * K, K, BLOCK_K)
    bias = tl.load(bias_ptr + row) if bias_ptr is not None else 0.0
    if GATED:
        up_weights = _load_chunks(weight_ptr + (row + N)[:, None] * K, K, BLOCK_K)
        up_bias = tl.load(bias_ptr + row + N) if bias_ptr is not None else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
    xs = _load_chunks(x_ptr, K, BLOCK_K)
    y = _sum_products(weights, xs, bias)
    if GATED:
        up = _sum_products(up_weights, xs, up_bias)
        # Rounded at the same points as in the twin.
        gate = y.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(y.dtype)
        y = (gate.to(tl.float32) * up.to(tl.float32)).to(y.dtype)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _load_chunks(ptrs, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """K values from each pointer on, as a tuple of tiles [pointers, BLOCK_K]."""
    chunks: tl.tuple = ()
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            chunks += (tl.load(ptrs + k),)
        else:
            chunks += (tl.load(ptrs + k, mask=k < K, other=0.0),)
    return chunks


@triton.jit
def _sum_products(weights, xs, bias):
    """One input row times the rows of the weight that these tiles hold, plus bias, in the input's dtype."""
    products = weights[0].to(tl.float32) * xs[0].to(tl.float32)
    for c in tl.static_range(1, len(weights)):
        products += weights[c].to(tl.float32) * xs[c].to(tl.float32)
    return (tl.sum(products, 1) + bias).to(xs[0].dtype)
