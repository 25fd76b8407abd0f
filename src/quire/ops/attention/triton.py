"""Paged attention in Triton: any mix of prefill and decode rows in one launch, over a work list planned once per step.

Called by `layers/attention`; the runner plans and uploads the list (`work.py`) for all layers of a group. Knows tensors
and block tables; nothing of requests, schedulers or models.

A cache is passed as [blocks, 2, block_size, K, D], but the bytes inside a block are in this backend's own order, head
by head: [2, K, block_size, D] (`cache_view`), so that a head's keys of one block are one contiguous piece.

Shape letters: T query tokens of the step, R rows, H query heads, K key/value heads, G = H/K, D head size (in the kernel
padded to a power of two), U units; in a unit: M tile rows (row m is head m % G of its query token m // G), N keys at a
time; in a merge: X tile rows at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention import triton_codes
from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton_parts import LOG2_E, LOWEST, finish, load_unit
from quire.ops.attention.work import Tile, WorkShape, plan
from quire.ops.launch import has_little_shared_memory, options, pdl


def config(dtype: torch.dtype, head_size: int, group_size: int, *, decode: bool) -> Tile:
    """The tile for steps whose rows have a few queries each (bound by memory), or for those with prefill rows."""
    lowest = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:  # exactness checks: no tensor cores, speed does not matter
        return Tile(lowest, 32, 4, 2, 4)
    if has_little_shared_memory():
        if head_size > 128:
            return Tile(lowest, 32 if head_size <= 256 else 16, 4, 2, 4)
        return Tile(lowest, 64, 4, 2, 4) if decode else Tile(max(64, lowest), 64, 4, 2, 2)
    if head_size > 256:
        return Tile(lowest, 32, 4, 2, 4) if decode else Tile(max(64, lowest), 32, 8, 2, 1)
    if decode:
        return Tile(lowest, 64, 4, 2, 4) if lowest == 16 and head_size <= 128 else Tile(lowest, 32, 4, 4, 4)
    return Tile(max(128, lowest), 64, 8, 3 if head_size <= 128 else 2, 2)


def work_shape(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, *, decode: bool, has_codes: bool = False
) -> WorkShape:
    """`has_codes`: the cache holds codes, with scales."""
    group_size = num_heads // num_kv_heads
    choose = triton_codes.config if has_codes else config
    return WorkShape(choose(dtype, head_size, group_size, decode=decode), num_kv_heads, group_size, head_size)


def supports(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    fits = head_size % 8 == 0 and head_size <= 512 and block_size >= 16  # rows of 16 bytes
    return dtype in (torch.float32, torch.float16, torch.bfloat16) and fits


def cache_view(cache: Tensor) -> Tensor:
    """The memory of a cache as it is used here: [blocks, 2, K, block_size, D]."""
    num_blocks, _, size, K, D = cache.shape
    return cache.as_strided((num_blocks, 2, K, size, D), (cache.stride(0), K * size * D, size * D, D, 1))


def paged_attention(
    q_THD: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As the twin; `scale` is positive. q and out may be strided along T and H.

    Each of `tables.work` is a launch. These and the block table must be complete before the first kernel of the step
    starts, as they are read before the kernels ahead have finished.
    """
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if out is None else out
    _, H, D = q_THD.shape
    _, _, block_size, K, _ = cache.shape
    dependent = pdl(q_THD)
    works = tables.work
    if works is None:
        is_decode, has_codes = tables.max_query_len == 1, scales is not None
        shape = work_shape(q_THD.dtype, H, K, D, decode=is_decode, has_codes=has_codes)
        works = (plan(q_THD, tables, shape, window),)
    for work in works:
        if scales is not None:
            triton_codes.launch(q_THD, cache, scales, tables, work, out, scale, window, sinks_H, softcap)
            continue
        _attention[K, work.units.shape[0]](
            q_THD,
            cache,
            tables.block_table,
            work.units,
            tables.shifts,
            out,
            sinks_H,
            work.partials,
            work.stats,
            work.counters,
            scale * LOG2_E.value,
            q_THD.stride(0),
            q_THD.stride(1),
            out.stride(0),
            out.stride(1),
            cache.stride(0),
            tables.block_table.stride(0),
            G=H // K,
            D=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_SIZE=block_size,
            WINDOW=window,
            SOFTCAP=softcap,
            TILE_M=work.tile.tile_m,
            TILE_N=work.tile.tile_n,
            PDL=dependent,
            num_warps=work.tile.num_warps,
            num_stages=work.tile.num_stages,
            **options(dependent),
        )
    return out


@triton.jit
def _attention(
    q,
    cache,
    block_table,
    units,
    shifts,
    out,
    sinks,
    partials,
    stats,
    counters,
    factor,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    table_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, unit = tl.program_id(0), tl.program_id(1)
    row, first_token, num_tokens, pos, begin, end, num_splits, first_unit = load_unit(units, unit)
    # Block ids are loaded one turn of the loop ahead: loaded in the same turn, they would halve the stages of K and V.
    m_M, d_D, n_N = tl.arange(0, TILE_M), tl.arange(0, BLOCK_D), tl.arange(0, TILE_N)
    table = block_table + row.to(tl.int64) * table_stride
    key_N = begin + n_N
    block_N = tl.load(table + key_N // BLOCK_SIZE, mask=key_N < end, other=0)
    # Programs with nothing to do wait too: the next kernel takes the end of this one as the end of all before it.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_tokens == 0:
        return
    if shifts is not None:
        shift = tl.load(shifts + row)
        pos, begin, end = pos - shift, tl.maximum(begin - shift, 0), end - shift
        block_N = tl.load(table + (begin + n_N) // BLOCK_SIZE, mask=begin + n_N < end, other=0)

    token_M, head_M = first_token + m_M // G, kv_head * G + m_M % G
    pos_M = pos + m_M // G
    is_real_MD = (m_M < num_tokens * G)[:, None] & (d_D < D)[None, :]
    q_M = token_M.to(tl.int64) * q_token_stride + head_M * q_head_stride
    q_MD = tl.load(q + q_M[:, None] + d_D[None, :], mask=is_real_MD, other=0.0)
    keys = cache + kv_head * (BLOCK_SIZE * D) + d_D[None, :]
    values = keys + tl.num_programs(0) * (BLOCK_SIZE * D)
    max_M = tl.full((TILE_M,), LOWEST, tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    acc_MD = tl.zeros((TILE_M, BLOCK_D), tl.float32)
    for start in range(begin, end, TILE_N):
        key_N = start + n_N
        in_range_ND = (key_N < end)[:, None] & (d_D < D)[None, :]
        offset_N = block_N.to(tl.int64) * block_stride + key_N % BLOCK_SIZE * D
        next_key_N = key_N + TILE_N
        block_N = tl.load(table + next_key_N // BLOCK_SIZE, mask=next_key_N < end, other=0)
        k_ND = tl.load(keys + offset_N[:, None], mask=in_range_ND, other=0.0)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
            s_MN = SOFTCAP * LOG2_E * (1 - 2 / (tl.exp2(s_MN * (factor * 2 / SOFTCAP)) + 1))
        # Whether some query must not see some of these keys.
        is_partly_hidden = start + TILE_N > tl.minimum(end, pos + 1)
        if WINDOW:
            is_partly_hidden |= start < pos + num_tokens - WINDOW
        if is_partly_hidden:
            visible_MN = (key_N[None, :] <= pos_M[:, None]) & (key_N < end)[None, :]
            if WINDOW:
                visible_MN &= key_N[None, :] > pos_M[:, None] - WINDOW
            s_MN = tl.where(visible_MN, s_MN, float("-inf"))
        s_factor = 1.0 if SOFTCAP > 0 else factor
        new_max_M = tl.maximum(max_M, tl.max(s_MN, 1) * s_factor)
        p_MN = tl.exp2(s_MN * s_factor - new_max_M[:, None])
        alpha_M = tl.exp2(max_M - new_max_M)
        max_M = new_max_M
        sum_M = sum_M * alpha_M + tl.sum(p_MN, 1)
        v_ND = tl.load(values + offset_N[:, None], mask=in_range_ND, other=0.0)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * alpha_M[:, None], input_precision="ieee")

    finish(
        acc_MD,
        max_M,
        sum_M,
        out,
        sinks,
        partials,
        stats,
        counters,
        unit,
        first_unit,
        num_splits,
        kv_head,
        first_token,
        num_tokens,
        out_token_stride,
        out_head_stride,
        G,
        D,
        BLOCK_D,
        TILE_M,
    )
