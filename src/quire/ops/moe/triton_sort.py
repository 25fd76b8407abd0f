"""Assignments of tokens to experts sorted by expert, in Triton, and cut into tiles; nothing waits for the device.

Called by `triton.py`. Shape letters: A assignments, and in the kernels B bins (the number of experts rounded up to a
power of two), C assignments at a time, P parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl, wait_turn

# Assignments are sorted in parts: at least SORT_PART of them in each, and at most MAX_SORT_PARTS parts.
SORT_PART, MAX_SORT_PARTS = 4096, 16


class Plan(NamedTuple):
    """Assignments by expert, and the tiles they are cut into; all on the device."""

    order_A: Tensor  # int32: assignments in the order of their experts
    tiles: Tensor  # int32: how many, then of each tile its expert, its first place in `order_A`, and its expert's end
    block_m: int
    max_tiles: int  # for any distribution over experts


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int, block_m: int) -> Plan:
    """Keeps the order of tokens inside an expert.

    Few assignments are sorted in one launch; many are counted in parts first.
    """
    A = expert_ids_TK.numel()
    max_tiles = min(A, (A + min(num_experts, A) * (block_m - 1)) // block_m)
    order_A = expert_ids_TK.new_empty(A, dtype=torch.int32)
    tiles = expert_ids_TK.new_empty(1 + 3 * max_tiles, dtype=torch.int32)
    dependent = pdl(expert_ids_TK)
    bins = triton.next_power_of_2(num_experts)
    part = max(SORT_PART, triton.next_power_of_2(triton.cdiv(A, MAX_SORT_PARTS)))
    num_parts = triton.cdiv(A, part)
    chunk = min(max(triton.next_power_of_2(A), 128), 2048)
    common = dict(PART=part, BINS=bins, CHUNK=chunk, PDL=dependent, num_warps=4, **options(dependent))
    counts = expert_ids_TK.new_empty(num_parts, bins, dtype=torch.int32) if num_parts > 1 else None
    if counts is not None:
        _count_kernel[(num_parts,)](counts, expert_ids_TK, A, **common)
    _sort_kernel[num_experts, num_parts](
        order_A, tiles, expert_ids_TK, counts, A, MAX_PARTS=MAX_SORT_PARTS, BLOCK_M=block_m, **common
    )
    return Plan(order_A, tiles, block_m, max_tiles)


@triton.jit
def _count_kernel(
    counts_ptr, ids_ptr, num_assignments, PART: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """How many assignments of a part each expert has."""
    wait_turn(PDL)
    part = tl.program_id(0)
    counts_B = _count(ids_ptr, part * PART, tl.minimum(part * PART + PART, num_assignments), BINS, CHUNK)
    tl.store(counts_ptr + part * BINS + tl.arange(0, BINS), counts_B)


@triton.jit
def _count(ids_ptr, begin, end, BINS: tl.constexpr, CHUNK: tl.constexpr):
    counts_B = tl.zeros((BINS,), tl.int32)
    for start in range(begin, end, CHUNK):
        place_C = start + tl.arange(0, CHUNK)
        counts_B += tl.histogram(tl.load(ids_ptr + place_C, place_C < end, 0), BINS, mask=place_C < end)
    return counts_B


@triton.jit
def _sort_kernel(
    order_ptr,
    tiles_ptr,
    ids_ptr,
    counts_ptr,
    num_assignments,
    MAX_PARTS: tl.constexpr,
    PART: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program lists the assignments of one part to one expert. From all counts follows where to."""
    wait_turn(PDL)
    expert, part = tl.program_id(0), tl.program_id(1)
    bin_B = tl.arange(0, BINS)
    before = 0  # the expert's assignments in earlier parts
    if counts_ptr is None:
        counts_B = _count(ids_ptr, 0, num_assignments, BINS, CHUNK)
    else:
        p_P = tl.arange(0, MAX_PARTS)
        there_PB = (p_P < tl.num_programs(1))[:, None] & (bin_B >= 0)[None, :]
        counts_PB = tl.load(counts_ptr + p_P[:, None] * BINS + bin_B[None, :], there_PB, 0)
        counts_B = tl.sum(counts_PB, 0)
        before = tl.sum(tl.where((p_P < part)[:, None] & (bin_B == expert)[None, :], counts_PB, 0))
    count = tl.sum(tl.where(bin_B == expert, counts_B, 0), 0)
    first = tl.sum(tl.where(bin_B < expert, counts_B, 0), 0)
    if part == 0:
        tiles_B = (counts_B + BLOCK_M - 1) // BLOCK_M
        first_tile = tl.sum(tl.where(bin_B < expert, tiles_B, 0), 0)
        if expert == 0:
            tl.store(tiles_ptr, tl.sum(tiles_B, 0))
        for start in range(0, count, BINS * BLOCK_M):  # BINS tiles at a time
            place_B = start + bin_B * BLOCK_M
            tile_B = tiles_ptr + 1 + 3 * (first_tile + place_B // BLOCK_M)
            tl.store(tile_B, expert, place_B < count)
            tl.store(tile_B + 1, first + place_B, place_B < count)
            tl.store(tile_B + 2, first + count, place_B < count)
    first += before
    end = tl.minimum(part * PART + PART, num_assignments)
    for start in range(part * PART, end, CHUNK):
        place_C = start + tl.arange(0, CHUNK)
        mine_C = (tl.load(ids_ptr + place_C, place_C < end, -1) == expert).to(tl.int32)
        tl.store(order_ptr + first + tl.cumsum(mine_C, 0) - 1, place_C, mine_C != 0)
        first += tl.sum(mine_C, 0)


def sorted_rows(x_TD: Tensor, order_A: Tensor, top_k: int) -> Tensor:
    """[A, D]: of each assignment its token's row."""
    (_, D), A = x_TD.shape, len(order_A)
    out_AD = torch.empty(A, D, dtype=x_TD.dtype, device=x_TD.device)
    dependent = pdl(x_TD)
    block = min(1024, triton.next_power_of_2(D))
    _sorted_rows_kernel[A, triton.cdiv(D, block)](
        out_AD, x_TD, order_A, D=D, TOP_K=top_k, BLOCK=block, PDL=dependent, num_warps=4, **options(dependent)
    )
    return out_AD


@triton.jit
def _sorted_rows_kernel(
    out_ptr, x_ptr, order_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_turn(PDL)
    place = tl.program_id(0).to(tl.int64)
    token = (tl.load(order_ptr + place) // TOP_K).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place * D + d, tl.load(x_ptr + token * D + d, d < D, 0.0), d < D)
