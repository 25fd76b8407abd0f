"""A mixture's experts in Triton, from one row to thousands; twin: `ops/moe/reference.py`.

Called by the Triton expert backend. Knows tensors only. Nothing waits for the device, and launches depend on shapes
alone, so that a step can be recorded. No sum is made with atomics: the same input gives the same bits.

An assignment is a pair of a token and one of its experts. With few rows, every assignment reads its own weights, as
fast as memory allows, in two launches. With more, assignments are sorted by expert, each expert's rows are multiplied
in tiles of `block_m`, and the results of a token's experts are added up, in their order. Packed weights have kernels of
their own for the products (`ops/packed_linear`).

Shape letters: T tokens, K experts of a token, A = T * K assignments (a is of token a // K, to its expert number a % K),
E experts, D hidden size, F width of an expert; of one product M rows, N outputs, J inputs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.launch import capability, has_little_shared_memory, options, pdl, wait_turn
from quire.ops.moe.activation import gated
from quire.ops.moe.triton_few import Tile, down_few, gate_up_few, load_tile
from quire.ops.moe.triton_sort import Plan, sort_by_expert
from quire.ops.packed_linear import many_rows, tiles
from quire.ops.packed_linear.cuts import Rows, expert_cut, expert_rows, overlaps
from quire.ops.packed_linear.rows import round_inputs
from quire.ops.packed_linear.triton import Assigned, down_experts, gate_up_experts
from quire.ops.packed_linear.words import ExpertWords

# Bytes of weights that a program of few rows has in flight, in each of the two products.
GATE_UP_BYTES, DOWN_BYTES = 16 << 10, 32 << 10
MAX_FEW_ROWS = 8
# Rows of an expert, on average, from which on unpacking its weights takes less than decoding them for each tile.
UNPACKED_ROWS = 512


class Config(NamedTuple):
    block_m: int  # assignments of a tile, all to one expert; 0: each by itself, without sorting
    gate_up: Tile
    down: Tile


def config(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, expert_size: int, dtype: torch.dtype
) -> Config:
    """Depends on shapes and the kind of card only.

    All tiles of tensor cores add up inputs from the first to the last, so a row's sums hardly depend on the number of
    rows.
    """
    mean = num_tokens * top_k / num_experts  # rows of an expert
    if num_tokens == 1 or (num_tokens <= MAX_FEW_ROWS and mean <= 0.5):
        return Config(
            0,
            _few_rows_tile(2 * hidden_size * dtype.itemsize, hidden_size, GATE_UP_BYTES, dtype),
            _few_rows_tile(top_k * expert_size * dtype.itemsize, expert_size, DOWN_BYTES, dtype),
        )
    if dtype == torch.float32:  # exactness checks: no tensor cores, speed does not matter
        return Config(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    largest = 64 if has_little_shared_memory() else 128
    # Most experts have one tile, until they fill several of the largest.
    block_m = min(max(16, triton.next_power_of_2(int(1.5 * mean))), largest)
    if block_m <= 32:
        return Config(block_m, Tile(64, 64, 4, 4, swap=True), Tile(128, 64, 4, 4, swap=True))
    if block_m == 64:
        return Config(block_m, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))
    if hidden_size % 256 or expert_size % 128:
        down = Tile(256, 64, 8, 3) if hidden_size % 256 == 0 else Tile(128, 64, 8, 4)
        return Config(block_m, Tile(128, 64, 8, 4), down)
    bulk = capability() >= (9, 0)
    return Config(block_m, Tile(128, 64, 8, 4, bulk=bulk), Tile(256, 64, 8, 3, bulk=bulk))


def _few_rows_tile(output_bytes: int, num_inputs: int, tile_bytes: int, dtype: torch.dtype) -> Tile:
    """`output_bytes`: of the weights of one output.

    At most 64 registers of a thread hold weights, which it loads 16 bytes at a time.
    """
    block_n = 1 << max(1, tile_bytes // output_bytes).bit_length() - 1
    num_warps = min(16, max(4, triton.next_power_of_2(block_n * output_bytes // (32 * 64 * 4))))
    block_k = min(triton.next_power_of_2(num_inputs), num_warps * 32 * 16 // dtype.itemsize // block_n)
    return Tile(block_n, block_k, num_warps)


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    gate_up_E2FD: Tensor | ExpertWords,
    down_EDF: Tensor | ExpertWords,
    *,
    activation: str = "silu",
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    added_TD: Tensor | None = None,
    cut: Config | None = None,
) -> Tensor:
    """As the twin. All tensors are contiguous."""
    (T, D), K = x_TD.shape, weights_TK.shape[1]
    if not T:
        return torch.empty_like(x_TD)
    gate_up_E2FD, down_EDF = _unpacked(gate_up_E2FD, x_TD, K), _unpacked(down_EDF, x_TD, K)
    if isinstance(gate_up_E2FD, ExpertWords):
        E, F = gate_up_E2FD.num_experts, gate_up_E2FD.num_outputs // 2
    else:
        E, F = gate_up_E2FD.shape[0], gate_up_E2FD.shape[1] // 2
    if cut is None:
        cut = config(T, K, E, D, F, x_TD.dtype)
        if isinstance(gate_up_E2FD, ExpertWords) and cut.block_m:
            cut = cut._replace(block_m=expert_rows(T * K / E, x_TD, gate_up_E2FD.weight))
    if not cut.block_m:
        to = Assigned(expert_ids_TK, weights_TK, E)
        h_AF = _gate_up_few(x_TD, gate_up_E2FD, gate_up_bias_E2F, to, activation, cut.gate_up)
        follows_gate_up = isinstance(gate_up_E2FD, ExpertWords)
        return _down_few(h_AF, down_EDF, down_bias_ED, to, added_TD, cut.down, follows_gate_up)
    plan = sort_by_expert(expert_ids_TK, E, cut.block_m)
    h_AF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    _grouped(h_AF, x_TD, gate_up_E2FD, gate_up_bias_E2F, plan, cut.gate_up, K, activation)
    y_AD = torch.empty(T * K, D, dtype=x_TD.dtype, device=x_TD.device)
    _grouped(y_AD, h_AF, down_EDF, down_bias_ED, plan, cut.down, K)
    out_TD = torch.empty_like(x_TD)
    block = min(triton.next_power_of_2(D), 1024)
    dependent = pdl(x_TD)
    _add_up_kernel[T, triton.cdiv(D, block)](
        out_TD, y_AD, weights_TK, added_TD, D=D, TOP_K=K, BLOCK=block, PDL=dependent, num_warps=4, **options(dependent)
    )
    return out_TD


def _unpacked(weight: Tensor | ExpertWords, x_TD: Tensor, top_k: int) -> Tensor | ExpertWords:
    """Plain, if there are so many rows that this pays."""
    if not isinstance(weight, ExpertWords) or weight.weight.rounds is not None or overlaps(x_TD, weight.weight):
        return weight
    if len(x_TD) * top_k < UNPACKED_ROWS * weight.num_experts:
        return weight
    return many_rows.unpack(weight.weight, x_TD.dtype).view(weight.num_experts, weight.num_outputs, -1)


# ---- few rows --------------------------------------------------------------------------------------------------------


def _gate_up_few(
    x_TD: Tensor,
    weight: Tensor | ExpertWords,
    bias_E2F: Tensor | None,
    to: Assigned,
    activation: str,
    tile: Tile,
) -> Tensor:
    """[A, F]"""
    if isinstance(weight, ExpertWords):
        inputs, scales = round_inputs(x_TD, weight.weight)
        return gate_up_experts(inputs, scales, weight.weight, bias_E2F, to, activation, x_TD.dtype)
    h_AF = torch.empty(to.expert_ids.numel(), weight.shape[1] // 2, dtype=x_TD.dtype, device=x_TD.device)
    gate_up_few(h_AF, x_TD, to.expert_ids, weight, bias_E2F, tile, ACTIVATION=activation, **_common(x_TD, to))
    return h_AF


def _down_few(
    h_AF: Tensor,
    weight: Tensor | ExpertWords,
    bias_ED: Tensor | None,
    to: Assigned,
    added_TD: Tensor | None,
    tile: Tile,
    follows_gate_up: bool,
) -> Tensor:
    """[T, D]"""
    if isinstance(weight, ExpertWords):
        inputs, scales = round_inputs(h_AF, weight.weight)
        return down_experts(inputs, scales, weight.weight, bias_ED, to, added_TD, h_AF.dtype, follows_gate_up)
    out_TD = torch.empty(len(to.expert_ids), weight.shape[1], dtype=h_AF.dtype, device=h_AF.device)
    down_few(out_TD, h_AF, to.weights, to.expert_ids, weight, bias_ED, added_TD, tile, **_common(h_AF, to))
    return out_TD


def _common(x: Tensor, to: Assigned) -> dict[str, Any]:
    return dict(TOP_K=to.expert_ids.shape[1], PDL=pdl(x), **options(pdl(x)))


# ---- many rows: sort, multiply, multiply, add up ----


def _grouped(
    out: Tensor,
    x: Tensor,
    weight: Tensor | ExpertWords,
    bias: Tensor | None,
    plan: Plan,
    tile: Tile,
    top_k: int,
    activation: str | None = None,
) -> None:
    """One product of every expert with its rows.

    The gated one reads rows in the order of tokens and writes them sorted by expert; the other one the reverse.
    """
    is_gated = activation is not None
    if isinstance(weight, ExpertWords):
        inputs, scales = round_inputs(x, weight.weight)
        mean = len(plan.order_A) / weight.num_experts
        tiles.multiply(
            out,
            inputs,
            scales,
            weight.weight,
            bias,
            expert_cut(plan.block_m, mean, inputs, weight.weight, x.dtype, is_gated),
            dtype=x.dtype,
            rows=Rows(plan.order_A, plan.tiles, plan.max_tiles, top_k, reads_tokens=is_gated),
            num_experts=weight.num_experts,
            activation=activation,
        )
        return
    N, J = out.shape[1], x.shape[1]
    bulk = TensorDescriptor.from_tensor(weight.view(-1, J), [tile.block_n, tile.block_k]) if tile.bulk else None
    dependent = pdl(x)
    _grouped_kernel[(plan.max_tiles * triton.cdiv(N, tile.block_n),)](
        out,
        x,
        weight,
        bulk,
        bias,
        plan.order_A,
        plan.tiles,
        N=N,
        J=J,
        TOP_K=top_k,
        ACTIVATION=activation,
        BLOCK_M=plan.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SWAP=tile.swap,
        PDL=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options(dependent),
    )


@triton.jit
def _grouped_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    weight_bulk,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    N: tl.constexpr,
    J: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has BLOCK_N outputs of one tile's rows.

    The programs of a tile are neighbours and share its rows in the cache.
    """
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    GATED: tl.constexpr = ACTIVATION is not None
    wait_turn(PDL)
    tile, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    if tile >= tl.load(tiles_ptr):
        return
    expert = tl.load(tiles_ptr + 1 + 3 * tile).to(tl.int64)
    place_M = tl.load(tiles_ptr + 2 + 3 * tile) + tl.arange(0, BLOCK_M)
    end = tl.load(tiles_ptr + 3 + 3 * tile)
    inside_M = place_M < end
    # Past the ends it loads the last row or output again, so that loads need no mask.
    place_M = tl.minimum(place_M, end - 1)
    assignment_M = tl.load(order_ptr + place_M)
    from_M = (assignment_M // TOP_K if GATED else place_M).to(tl.int64)
    to_M = (place_M if GATED else assignment_M).to(tl.int64)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
    output_N = tl.minimum(n_N, N - 1)

    ROWS: tl.constexpr = 2 * N if GATED else N  # of an expert's matrix
    k_K = tl.arange(0, BLOCK_K)
    x_MK = x_ptr + from_M[:, None] * J + k_K[None, :]
    weight_NK = weight_ptr + expert * (ROWS * J) + output_N[:, None] * J + k_K[None, :]
    first_row = (expert * ROWS + column * BLOCK_N).to(tl.int32)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    acc_up = acc
    for start in range(0, J, BLOCK_K):
        x = load_tile(x_MK + start, start + k_K[None, :], J, BLOCK_K)
        if weight_bulk is None:
            acc = _multiply(x, load_tile(weight_NK + start, start + k_K[None, :], J, BLOCK_K), acc, SWAP)
            if GATED:
                up = load_tile(weight_NK + (N * J + start), start + k_K[None, :], J, BLOCK_K)
                acc_up = _multiply(x, up, acc_up, SWAP)
        else:  # past an expert's end this loads rows of the next one, past an input's end zeros
            acc = _multiply(x, weight_bulk.load([first_row, start]), acc, SWAP)
            if GATED:
                acc_up = _multiply(x, weight_bulk.load([first_row + N, start]), acc_up, SWAP)

    y_MN = tl.trans(acc) if SWAP else acc
    if bias_ptr is not None:
        y_MN += tl.load(bias_ptr + expert * ROWS + output_N).to(tl.float32)[None, :]
    if GATED:
        up_MN = tl.trans(acc_up) if SWAP else acc_up
        if bias_ptr is not None:
            up_MN += tl.load(bias_ptr + expert * ROWS + N + output_N).to(tl.float32)[None, :]
        y_MN = gated(y_MN, up_MN, ACTIVATION)
    inside_MN = inside_M[:, None] & (n_N < N)[None, :]
    tl.store(out_ptr + to_M[:, None] * N + n_N[None, :], y_MN.to(out_ptr.dtype.element_ty), inside_MN)


@triton.jit
def _multiply(x_MK, weight_NK, acc, SWAP: tl.constexpr):
    """Float32 is multiplied as such ("ieee"), for exactness; for other types the setting means nothing."""
    if SWAP:
        return tl.dot(weight_NK, tl.trans(x_MK), acc, input_precision="ieee")
    else:
        return tl.dot(x_MK, tl.trans(weight_NK), acc, input_precision="ieee")


@triton.jit
def _add_up_kernel(
    out_ptr, y_ptr, weights_ptr, added_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The weighted sum of the results of a token's experts."""
    wait_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < D
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + k)
        total += weight * tl.load(y_ptr + (token * TOP_K + k) * D + i, inside, 0.0).to(tl.float32)
    if added_ptr is not None:
        total += tl.load(added_ptr + token * D + i, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + token * D + i, total.to(out_ptr.dtype.element_ty), inside)
