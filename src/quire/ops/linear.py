"""Linear layers of few rows, at the speed their weights can be read; twin: `ops/ref/linear.py`.

Called by quantization methods where `few_rows` says so. Knows tensors only. Two kernels: a matrix-vector product that holds
its weights in registers before its input exists (1 to 4 rows), and tensor-core products whose warps share out K (to 64).

Shape letters: M rows, N outputs, K inputs, F half of a gated projection, W warps (each with its own part of K), B part of K.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl

# Set from benchmarks/gpu_linear.py.
DOT_ROWS = 16  # up to these many rows the tensor-core kernel beats torch's; it can do MAX_ROWS
VECTOR_INPUTS = 4096  # up to these many inputs, all rows together, the matrix-vector kernel is used, as for one row
MAX_VECTOR_ROWS, MAX_ROWS = 4, 64
MULTIPROCESSORS = 132
PROGRAMS = 4 * MULTIPROCESSORS  # of a vector product behind a norm: half of the registers, the rest for the next kernel
VECTOR_TILE_BYTES = 16 << 10  # of weights, that a program of 4 warps has in flight: 32 registers per thread
MAX_TILED_K = 8192  # inputs of a row that fit in a program's registers beside two tiles
PREFETCH_BYTES = tl.constexpr(64 << 10)  # by a program of a dot; with more, what comes early is gone again when it is used


class Config(NamedTuple):
    """How one product is cut up. `warps` of a dot also says in how many parts K is summed."""

    dot: bool
    block_n: int
    block_k: int  # vector: inputs per chunk, of which all are in flight at once; dot: inputs per warp and step
    warps: int
    tiles: int = 1  # vector: of block_n rows, one after the other in a program
    stages: int = 4  # dot: steps in flight


def few_rows(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether this file's kernels are to be preferred to torch's; both contiguous, which the kernels take for granted."""
    if not x_MK.is_cuda or len(x_MK) > DOT_ROWS or x_MK.dtype != weight_NK.dtype:
        return False
    return x_MK.is_contiguous() and weight_NK.is_contiguous()


def config(M: int, N: int, K: int, dtype: torch.dtype, gated: bool = False, norm: bool = False) -> Config:
    """A program's share of the work; `N` counts outputs, so half the weight's rows if gated."""
    if M == 1 or (M <= MAX_VECTOR_ROWS and M * K <= VECTOR_INPUTS):
        return _vector_config(N, K, dtype, gated, norm)
    return _dot_config(M, N, K, dtype, gated)


def _vector_config(N: int, K: int, dtype: torch.dtype, gated: bool, norm: bool) -> Config:
    row_bytes = K * dtype.itemsize * (2 if gated else 1)
    warps = min(16, max(4, triton.next_power_of_2(row_bytes * 4 // VECTOR_TILE_BYTES)))
    # Sixteen bytes per thread and row.
    block_k = min(triton.next_power_of_2(K), warps * 32 * 16 // dtype.itemsize)
    block_n = _power_of_2_below(min(VECTOR_TILE_BYTES // row_bytes, N // MULTIPROCESSORS))
    # Several tiles per program spare norming x again; reading it again is cheap, and small programs leave no last wave.
    tiles = triton.cdiv(triton.cdiv(N, block_n), PROGRAMS) if norm and K <= MAX_TILED_K else 1
    return Config(False, block_n, block_k, warps, tiles)


def _dot_config(M: int, N: int, K: int, dtype: torch.dtype, gated: bool) -> Config:
    if dtype == torch.float32:  # no tensor cores at this precision: only right, not fast
        return Config(True, 16, 16, 4, stages=2)
    # A program reads all of x: wide tiles where there are enough of them for every multiprocessor.
    block_n = min(32, max(8, _power_of_2_below(N // 128)))
    return Config(True, block_n // 2 if gated and block_n > 8 else block_n, 64, 4, stages=4 if M <= 32 else 3)


def linear(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None, *, cut: Config | None = None
) -> Tensor:
    """x W^T + b, rounded to x's dtype and then given as `out_dtype`."""
    return _launch(x_MK, weight_NK, bias_N, out_dtype=out_dtype, cut=cut)


def linear_silu_mul(x_MK: Tensor, weight_2F_K: Tensor, bias_2F: Tensor | None = None, *, cut: Config | None = None) -> Tensor:
    """silu(gate) * up; gate is the first half of the weight's rows, up the second."""
    return _launch(x_MK, weight_2F_K, bias_2F, gated=True, cut=cut)


def norm_linear(
    x_MK: Tensor,
    residual_MK: Tensor | None,
    norm_weight_K: Tensor,
    eps: float,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    cut: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (y, residual): the residual stream after adding x, and the linear layer of its norm."""
    new_residual_MK = x_MK if residual_MK is None else torch.empty_like(x_MK)
    norm = residual_MK, norm_weight_K, eps, new_residual_MK
    return _launch(x_MK, weight_NK, bias_N, norm=norm, cut=cut), new_residual_MK


def norm_linear_silu_mul(
    x_MK: Tensor,
    residual_MK: Tensor | None,
    norm_weight_K: Tensor,
    eps: float,
    weight_2F_K: Tensor,
    bias_2F: Tensor | None = None,
    *,
    cut: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` with the gated activation behind it."""
    new_residual_MK = x_MK if residual_MK is None else torch.empty_like(x_MK)
    norm = residual_MK, norm_weight_K, eps, new_residual_MK
    return _launch(x_MK, weight_2F_K, bias_2F, gated=True, norm=norm, cut=cut), new_residual_MK


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool = False,
    norm: tuple[Tensor | None, Tensor | None, float, Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    cut: Config | None = None,
) -> Tensor:
    """`norm` is (residual to add, norm weight, eps, where the sum goes)."""
    (M, K), N = x.shape, len(weight) // (2 if gated else 1)
    y = torch.empty(M, N, dtype=out_dtype or x.dtype, device=x.device)
    residual, norm_weight, eps, new_residual = norm or (None, None, 0.0, None)
    cut = cut or config(M, N, K, x.dtype, gated, norm is not None)
    dependent = pdl(x)
    # Where there is no residual, norm weight or bias, None makes its branch disappear at compile time.
    tensors = x, residual, norm_weight, weight, bias, y, new_residual
    if cut.dot:
        _dot_kernel[(triton.cdiv(N, cut.block_n),)](
            *tensors, M, N, eps, K, max(16, triton.next_power_of_2(M)), cut.block_n, cut.block_k, cut.warps, gated, dependent,
            num_warps=cut.warps, num_stages=cut.stages, **options(dependent),
        )  # fmt: skip
    else:
        _vector_kernel[(triton.cdiv(N, cut.block_n * cut.tiles),)](
            *tensors, N, eps, M, K, cut.block_n, cut.block_k, cut.tiles, gated, dependent,
            num_warps=cut.warps, **options(dependent),
        )  # fmt: skip
    return y


def _power_of_2_below(n: int) -> int:
    return 1 << max(0, n.bit_length() - 1)


@triton.jit
def _vector_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    new_residual_ptr,
    N,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns TILES * BLOCK_N rows of the weight, a tile of them in registers and, while it sums, the next on its way."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0) * TILES
    weights = _weight_rows(weight_ptr, tile, N, K, BLOCK_N, BLOCK_K, CHUNKS, GATED)
    norm_weights = ()
    if norm_weight_ptr is not None:
        for c in tl.static_range(CHUNKS):
            k = c * BLOCK_K + tl.arange(0, BLOCK_K)
            norm_weights += (_load(norm_weight_ptr, k, k, K, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    xs = ()
    for m in tl.static_range(M):
        xs += _input_row(x_ptr, residual_ptr, norm_weights, new_residual_ptr, eps, m, K, BLOCK_K, CHUNKS)
    for _ in range(TILES - 1):
        ahead = _weight_rows(weight_ptr, tile + 1, N, K, BLOCK_N, BLOCK_K, CHUNKS, GATED)
        _sum_rows(weights, xs, bias_ptr, y_ptr, tile, N, M, BLOCK_N, CHUNKS, GATED)
        weights = ahead
        tile += 1
    _sum_rows(weights, xs, bias_ptr, y_ptr, tile, N, M, BLOCK_N, CHUNKS, GATED)


@triton.jit
def _weight_rows(
    weight_ptr, tile, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, GATED: tl.constexpr
):
    """CHUNKS tiles [BLOCK_N, BLOCK_K]; if gated, after them as many of the up projection."""
    # Past the end the last row again: no mask, so nothing but loads between a program's start and its wait.
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[:, None]
    tiles = ()
    for half in tl.static_range(2 if GATED else 1):
        for c in tl.static_range(CHUNKS):
            k = c * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            tiles += (_load(weight_ptr, (n + half * N) * K + k, k, K, BLOCK_K),)
    return tiles


@triton.jit
def _input_row(
    x_ptr, residual_ptr, norm_weights, new_residual_ptr, eps, m, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr
):
    """Row m in chunks; with norm weights, of the normed residual stream, which the first program also writes out."""
    xs = ()
    for c in tl.static_range(CHUNKS):
        k = c * BLOCK_K + tl.arange(0, BLOCK_K)
        x = _stream(x_ptr, residual_ptr, m * K + k, k, K, BLOCK_K)
        if residual_ptr is not None:
            if tl.program_id(0) == 0:
                tl.store(new_residual_ptr + m * K + k, x, mask=k < K)
        xs += (x,)
    if len(norm_weights) == 0:
        return xs
    else:
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for c in tl.static_range(CHUNKS):
            squares += xs[c].to(tl.float32) * xs[c].to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        normed = ()
        for c in tl.static_range(CHUNKS):
            normed += (_scaled(xs[c], scale, norm_weights[c]),)
        return normed


@triton.jit
def _scaled(x, scale, norm_weight):
    # Rounded before the weight and after it, as the twin does.
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * norm_weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _sum_rows(
    weights, xs, bias_ptr, y_ptr, tile, N, M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, GATED: tl.constexpr
):
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    for m in tl.static_range(M):
        y = _sum_products(weights, xs, 0, m * CHUNKS, CHUNKS)
        if GATED:
            up = _sum_products(weights, xs, CHUNKS, m * CHUNKS, CHUNKS)
        else:
            up = y
        _store(y, up, bias_ptr, y_ptr + m * N + n, n, N, n < N, xs[0].dtype, GATED)


@triton.jit
def _sum_products(weights, xs, w0: tl.constexpr, x0: tl.constexpr, CHUNKS: tl.constexpr):
    products = weights[w0].to(tl.float32) * xs[x0].to(tl.float32)[None, :]
    for c in tl.static_range(1, CHUNKS):
        products += weights[w0 + c].to(tl.float32) * xs[x0 + c].to(tl.float32)[None, :]
    return tl.sum(products, 1)


@triton.jit
def _store(y, up, bias_ptr, y_ptrs, n, N, mask, dtype: tl.constexpr, GATED: tl.constexpr):
    """Adds the bias, gates, and rounds as often as the twin does. `up` counts only if gated; n's shape broadcasts to y's."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        gate = y.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype)
        y = (gate.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    new_residual_ptr,
    M,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns BLOCK_N rows of the weight. Each warp multiplies its BLOCK_K of every WARPS * BLOCK_K inputs (a batched
    dot lays out one batch per warp), so that narrow tiles still fill tensor cores and no sum crosses programs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = WARPS * BLOCK_K
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0) * BLOCK_N
    if PDL:
        _prefetch_rows(weight_ptr, first, N, K, BLOCK_N)
        if GATED:
            _prefetch_rows(weight_ptr + N.to(tl.int64) * K, first, N, K, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BLOCK_M)[None, :, None]
    n = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[None, :, None]
    k_WB = tl.arange(0, WARPS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    # Past the end the last row again, here too: its products are never stored.
    x_at = tl.minimum(m, M - 1) * K
    if norm_weight_ptr is not None:
        squares = tl.zeros((WARPS, BLOCK_M, BLOCK_K), tl.float32)
        for start in range(0, K, STEP):
            k = start + k_WB
            x = _stream(x_ptr, residual_ptr, x_at + k, k, K, STEP)
            squares += x.to(tl.float32) * x.to(tl.float32)
            if residual_ptr is not None:
                if tl.program_id(0) == 0:
                    tl.store(new_residual_ptr + x_at + k, x, mask=(m < M) & (k < K))
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + eps)[None, :, None]
    y = tl.zeros((WARPS, BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((WARPS, BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, STEP):
        k = start + k_WB
        x = _stream(x_ptr, residual_ptr, x_at + k, k, K, STEP)
        if norm_weight_ptr is not None:
            x = _scaled(x, scale, _load(norm_weight_ptr, k, k, K, STEP))
        weight = _load(weight_ptr, n * K + k, k, K, STEP)
        y = tl.dot(x, tl.permute(weight, (0, 2, 1)), y, input_precision="ieee")
        if GATED:
            weight = _load(weight_ptr, (n + N) * K + k, k, K, STEP)
            up = tl.dot(x, tl.permute(weight, (0, 2, 1)), up, input_precision="ieee")
    m = tl.arange(0, BLOCK_M)[:, None]
    n = first + tl.arange(0, BLOCK_N)[None, :]
    _store(tl.sum(y, 0), tl.sum(up, 0), bias_ptr, y_ptr + m * N + n, n, N, (m < M) & (n < N), DTYPE, GATED)


@triton.jit
def _load(ptr, at, k, K: tl.constexpr, STEP: tl.constexpr):
    if K % STEP == 0:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, mask=k < K, other=0.0)


@triton.jit
def _stream(x_ptr, residual_ptr, at, k, K: tl.constexpr, STEP: tl.constexpr):
    """The input, or where there is a residual, the residual stream after adding it."""
    x = _load(x_ptr, at, k, K, STEP)
    if residual_ptr is not None:
        x = (x.to(tl.float32) + _load(residual_ptr, at, k, K, STEP).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _prefetch_rows(weight_ptr, first, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sends BLOCK_N rows, one piece of memory, on their way into the L2 cache while the kernel before this one runs."""
    ROW_BYTES: tl.constexpr = K * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    if ROW_BYTES % 16 == 0 and BLOCK_N * ROW_BYTES <= PREFETCH_BYTES:  # 16 is the instruction's unit
        num_bytes = tl.minimum(N - first, BLOCK_N) * ROW_BYTES
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [(weight_ptr + first.to(tl.int64) * K).to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
