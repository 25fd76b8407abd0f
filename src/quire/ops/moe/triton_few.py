"""Experts for few rows: every assignment reads its own weights, as fast as memory allows.

Called by `triton.py`, whose kernels for more rows share `load_tile`. All weights of a program are being
loaded before its first product. Letters: as in `triton.py`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import wait_turn
from quire.ops.moe.activation import gated


class Tile(NamedTuple):
    """How one product is cut up."""

    block_n: int  # outputs of a program; of a gated product, so many gates and so many ups
    block_k: int  # inputs at a time
    num_warps: int
    num_stages: int = 1
    swap: bool = False  # weights are the left operand, of which tensor cores want 64 rows: more than there are tokens
    bulk: bool = False  # weights are loaded through a tensor descriptor: rows are multiples of 16 bytes


def gate_up_few(
    h_AF: Tensor,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    gate_up_E2FD: Tensor,
    bias_E2F: Tensor | None,
    tile: Tile,
    **flags: Any,
) -> None:
    """h = activation(gate) * up, of each assignment."""
    num_assignments, F = h_AF.shape
    _few_gate_up_kernel[num_assignments, triton.cdiv(F, tile.block_n)](
        h_AF,
        x_TD,
        expert_ids_TK,
        gate_up_E2FD,
        bias_E2F,
        N=F,
        J=x_TD.shape[1],
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **flags,
    )


def down_few(
    out_TD: Tensor,
    h_AF: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    down_EDF: Tensor,
    bias_ED: Tensor | None,
    added_TD: Tensor | None,
    tile: Tile,
    **flags: Any,
) -> None:
    """The weighted sum of the down products of each token's assignments."""
    T, D = out_TD.shape
    _few_down_kernel[T, triton.cdiv(D, tile.block_n)](
        out_TD,
        h_AF,
        weights_TK,
        expert_ids_TK,
        down_EDF,
        bias_ED,
        added_TD,
        N=D,
        J=h_AF.shape[1],
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **flags,
    )


@triton.jit
def load_tile(ptrs, input_1K, J: tl.constexpr, BLOCK_K: tl.constexpr):
    if J % BLOCK_K == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, input_1K < J, 0.0)


@triton.jit
def _few_gate_up_kernel(
    h_ptr,
    x_ptr,
    ids_ptr,
    weight_ptr,
    bias_ptr,
    N: tl.constexpr,
    J: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has BLOCK_N of an assignment's activations.

    Programs of assignments to the same expert run at the same time, so that its weights are read from memory once.
    """
    wait_turn(PDL)
    assignment = tl.program_id(0)
    expert = tl.load(ids_ptr + assignment).to(tl.int64)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_N = tl.minimum(n_N, N - 1)
    weight_N1 = weight_ptr + expert * (2 * N * J) + output_N[:, None] * J
    gates = _load_chunks(weight_N1, J, BLOCK_K)
    ups = _load_chunks(weight_N1 + N * J, J, BLOCK_K)
    xs = _load_chunks(_for_all(x_ptr + (assignment // TOP_K).to(tl.int64) * J, BLOCK_N), J, BLOCK_K)
    gate_N = tl.sum(_products(gates, xs), 1)
    up_N = tl.sum(_products(ups, xs), 1)
    if bias_ptr is not None:
        gate_N += tl.load(bias_ptr + expert * (2 * N) + output_N).to(tl.float32)
        up_N += tl.load(bias_ptr + expert * (2 * N) + N + output_N).to(tl.float32)
    h_N = gated(gate_N, up_N, ACTIVATION)
    tl.store(h_ptr + assignment.to(tl.int64) * N + n_N, h_N.to(h_ptr.dtype.element_ty), n_N < N)


@triton.jit
def _few_down_kernel(
    out_ptr,
    h_ptr,
    weights_ptr,
    ids_ptr,
    weight_ptr,
    bias_ptr,
    added_ptr,
    N: tl.constexpr,
    J: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has BLOCK_N outputs of a token, from all of its experts, added up in their order."""
    wait_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_N = tl.minimum(n_N, N - 1)
    matrices: tl.tuple = ()
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k).to(tl.int64)
        matrices += (_load_chunks(weight_ptr + expert * (N * J) + output_N[:, None] * J, J, BLOCK_K),)
    total_NK, total_N = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + k)
        h_N1 = _for_all(h_ptr + (token * TOP_K + k) * J, BLOCK_N)
        total_NK += weight * _products(matrices[k], _load_chunks(h_N1, J, BLOCK_K))
        if bias_ptr is not None:
            expert = tl.load(ids_ptr + token * TOP_K + k).to(tl.int64)
            total_N += weight * tl.load(bias_ptr + expert * N + output_N).to(tl.float32)
    if added_ptr is not None:
        total_N += tl.load(added_ptr + token * N + output_N).to(tl.float32)
    tl.store(out_ptr + token * N + n_N, (tl.sum(total_NK, 1) + total_N).to(out_ptr.dtype.element_ty), n_N < N)


@triton.jit
def _for_all(row_ptr, BLOCK_N: tl.constexpr):
    """The row's pointer once per output: the threads that have the weights load it, not through shared memory."""
    return row_ptr + tl.zeros((BLOCK_N, 1), tl.int32)


@triton.jit
def _load_chunks(ptrs, J: tl.constexpr, BLOCK_K: tl.constexpr):
    """J values from each pointer on, as a tuple of tiles [pointers, BLOCK_K]."""
    chunks: tl.tuple = ()
    for start in tl.static_range(0, J, BLOCK_K):
        k_1K = start + tl.arange(0, BLOCK_K)[None, :]
        chunks += (load_tile(ptrs + k_1K, k_1K, J, BLOCK_K),)
    return chunks


@triton.jit
def _products(weights, xs):
    """Chunks of weights times chunks of a row, element by element, added up over the chunks."""
    total = weights[0].to(tl.float32) * xs[0].to(tl.float32)
    for c in tl.static_range(1, len(weights)):
        total += weights[c].to(tl.float32) * xs[c].to(tl.float32)
    return total
