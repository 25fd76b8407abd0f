"""Paged attention in Triton: any mix of prefill and decode rows in one launch, over a work list planned once per step.

Called by `layers/attention`; the runner plans and uploads the list (`work.py`) for all layers of a group. Knows tensors
and block tables; nothing of requests, schedulers or models.

A cache is passed as [blocks, 2, block_size, K, D], but the bytes inside a block are in this backend's own order, head
by head: [2, K, block_size, D] (`cache_view`), so that a head's keys of one block are one contiguous piece. Of a cache
with 8-bit codes, scales lie [2, K, block_size] in a block; they multiply scores and probabilities, not elements.

Shape letters: T query tokens of the step, R rows, H query heads, K key/value heads, G = H/K, D head size (in the kernel
padded to a power of two), U units; in a unit: M tile rows (row m is head m % G of its query token m // G), N keys at a
time; in a merge: X tile rows at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.work import Tile, WorkShape, plan
from quire.ops.launch import has_little_shared_memory, options, pdl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that a row that has seen no key yet needs no special case: exp2(LOWEST - LOWEST) is 1, and its sum is still
# 0.
LOWEST = tl.constexpr(-1e30)


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


def work_shape(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, *, decode: bool) -> WorkShape:
    group_size = num_heads // num_kv_heads
    return WorkShape(config(dtype, head_size, group_size, decode=decode), num_kv_heads, group_size, head_size)


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
        works = (plan(q_THD, tables, work_shape(q_THD.dtype, H, K, D, decode=tables.max_query_len == 1), window),)
    for work in works:
        _attention[K, work.units.shape[0]](
            q_THD,
            as_bytes(cache),
            scales,
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
            0 if scales is None else scales.stride(0),
            tables.block_table.stride(0),
            G=H // K,
            D=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_SIZE=block_size,
            CODES=code_kind(cache),
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
def load_unit(units, unit):
    """The columns of a unit, in order."""
    at = units + unit * 8
    row, first_token, num_tokens, position = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    first_key, end_key, num_splits, first_unit = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    return row, first_token, num_tokens, position, first_key, end_key, num_splits, first_unit


@triton.jit
def _attention(
    q,
    cache,
    scales,
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
    scales_stride,
    table_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
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
    if CODES is not None:
        q_MD, q_scale_M = for_codes(q_MD)
        key_scales = scales + kv_head * BLOCK_SIZE
        value_scales = key_scales + tl.num_programs(0) * BLOCK_SIZE
    keys = cache + kv_head * (BLOCK_SIZE * D) + d_D[None, :]
    values = keys + tl.num_programs(0) * (BLOCK_SIZE * D)
    max_M = tl.full((TILE_M,), LOWEST, tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    acc_MD = tl.zeros((TILE_M, BLOCK_D), tl.float32)
    for start in range(begin, end, TILE_N):
        key_N = start + n_N
        in_range_ND = (key_N < end)[:, None] & (d_D < D)[None, :]
        offset_N = block_N.to(tl.int64) * block_stride + key_N % BLOCK_SIZE * D
        scale_N = block_N.to(tl.int64) * scales_stride + key_N % BLOCK_SIZE
        next_key_N = key_N + TILE_N
        block_N = tl.load(table + next_key_N // BLOCK_SIZE, mask=next_key_N < end, other=0)
        k_ND = tl.load(keys + offset_N[:, None], mask=in_range_ND, other=0)
        if CODES is None:
            s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        else:
            s_MN = coded_scores(q_MD, q_scale_M, k_ND, key_scales + scale_N, key_N < end, CODES)
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
            s_MN = SOFTCAP * LOG2_E * (1 - 2 / (tl.exp2(s_MN * (factor * 2 / SOFTCAP)) + 1))
        # Whether some query must not see some of these keys.
        is_partly_hidden = start + TILE_N > tl.minimum(end, pos + 1)
        if WINDOW:
            is_partly_hidden |= start < pos + num_tokens - WINDOW
        if is_partly_hidden:
            s_MN = tl.where(_visible(key_N, end, pos_M, WINDOW), s_MN, float("-inf"))
        s_factor = 1.0 if SOFTCAP > 0 else factor
        new_max_M = tl.maximum(max_M, tl.max(s_MN, 1) * s_factor)
        p_MN = tl.exp2(s_MN * s_factor - new_max_M[:, None])
        alpha_M = tl.exp2(max_M - new_max_M)
        max_M = new_max_M
        sum_M = sum_M * alpha_M + tl.sum(p_MN, 1)
        v_ND = tl.load(values + offset_N[:, None], mask=in_range_ND, other=0)
        acc_MD *= alpha_M[:, None]
        if CODES is None:
            acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
        else:
            acc_MD += coded_sums(p_MN, v_ND, value_scales + scale_N, key_N < end, CODES, q_MD.dtype)

    if num_splits == 1:
        if sinks is not None:
            max_M, sum_M, alpha_M = _with_sink(max_M, sum_M, tl.load(sinks + head_M))
            acc_MD *= alpha_M[:, None]
        out_M = token_M.to(tl.int64) * out_token_stride + head_M * out_head_stride
        o_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_M[:, None] + d_D[None, :], o_MD, mask=is_real_MD)
        return

    # Split: store the partial result. The last split to finish merges all of them, in the order of their keys.
    K = tl.num_programs(0)
    place = (unit * K + kv_head).to(tl.int64)
    tl.store(stats + place * (2 * TILE_M) + m_M, max_M)
    tl.store(stats + place * (2 * TILE_M) + TILE_M + m_M, sum_M)
    partial_M = partials + place * (TILE_M * D) + m_M * D
    tl.store(partial_M[:, None] + d_D[None, :], acc_MD, mask=is_real_MD, cache_modifier=".cg")
    tl.debug_barrier()  # one thread does the atomic below, which must publish what all threads have stored
    counter = counters + first_unit * K + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != num_splits - 1:
        return
    tl.store(counter, 0)
    _merge(
        out,
        sinks,
        partials,
        stats,
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


@triton.jit
def _visible(key_N, end, pos_M, WINDOW: tl.constexpr):
    """Which keys the queries at the positions `pos_M` see."""
    visible_MN = (key_N[None, :] <= pos_M[:, None]) & (key_N < end)[None, :]
    if WINDOW:
        visible_MN &= key_N[None, :] > pos_M[:, None] - WINDOW
    return visible_MN


def code_kind(cache: Tensor) -> str | None:
    """How `code_values` reads a cache's bytes; None: they are no codes."""
    return {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(cache.dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """Kernels read and write float8 codes as bytes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def for_codes(q_MD):
    """(q to be multiplied by codes, a scale of each row). All codes are exact in float16; scaled, all numbers fit."""
    if q_MD.dtype == tl.float32:
        scale_M = tl.full((q_MD.shape[0],), 1.0, tl.float32)
    else:
        wide_MD = q_MD.to(tl.float32)
        scale_M = tl.maximum(tl.max(tl.abs(wide_MD), 1), 1e-30)
        q_MD = (wide_MD / scale_M[:, None]).to(tl.float16)
    return q_MD, scale_M


@triton.jit
def coded_scores(q_MD, q_scale_M, codes_ND, scales_N, inside_N, CODES: tl.constexpr):
    """q k^T, where keys are codes with scales at the pointers `scales_N`, and q is `for_codes`."""
    s_MN = tl.dot(q_MD, tl.trans(code_values(codes_ND, CODES, q_MD.dtype)), input_precision="ieee")
    return s_MN * q_scale_M[:, None] * tl.load(scales_N, mask=inside_N, other=0.0)[None, :]


@triton.jit
def coded_sums(p_MN, codes_ND, scales_N, inside_N, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """p v, where values are codes with scales at the pointers `scales_N`, multiplied as DTYPE."""
    scale_N = tl.load(scales_N, mask=inside_N, other=0.0)
    largest = tl.maximum(tl.max(scale_N, 0), 1e-30)  # so that probabilities times scales fit float16
    p_MN = (p_MN * (scale_N / largest)[None, :]).to(DTYPE)
    return tl.dot(p_MN, code_values(codes_ND, CODES, DTYPE), input_precision="ieee") * largest


@triton.jit
def code_values(codes, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """What codes stand for, before they are scaled."""
    if CODES == "e4m3":
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(DTYPE)


@triton.jit
def _merge(
    out,
    sinks,
    partials,
    stats,
    first_unit,
    num_splits,
    kv_head,
    first_token,
    num_tokens,
    out_token_stride,
    out_head_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """The result of a split tile: X of its rows at a time, SPLITS parts of them loaded at once, in a fixed order.

    Holds few values: if it needed more registers than the loop over keys, fewer programs would fit on a multiprocessor.
    Each part is a tensor of its own, so nothing is summed across threads.
    """
    HELD: tl.constexpr = 64
    ROWS: tl.constexpr = min(triton.next_power_of_2(G), HELD // 2)
    SPLITS: tl.constexpr = min(HELD // ROWS, 8)
    K = tl.num_programs(0)
    x_X, d_D = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    for start in range(0, num_tokens * G, ROWS):
        m_X = start + x_X
        is_real_X = m_X < num_tokens * G
        max_X = tl.full((ROWS,), LOWEST, tl.float32)
        sum_X = tl.zeros((ROWS,), tl.float32)
        acc_XD = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for split in range(0, num_splits, SPLITS):
            maxima: tl.tuple = ()
            sums: tl.tuple = ()
            accs: tl.tuple = ()
            for s in tl.static_range(SPLITS):
                there_X = is_real_X & (split + s < num_splits)
                place = ((first_unit + split + s) * K + kv_head).to(tl.int64)
                stats_X = stats + place * (2 * TILE_M) + m_X
                maxima += (tl.load(stats_X, mask=there_X, other=LOWEST, cache_modifier=".cg"),)
                sums += (tl.load(stats_X + TILE_M, mask=there_X, other=0.0, cache_modifier=".cg"),)
                partial_XD = partials + place * (TILE_M * D) + m_X[:, None] * D + d_D[None, :]
                there_XD = there_X[:, None] & (d_D < D)[None, :]
                accs += (tl.load(partial_XD, mask=there_XD, other=0.0, cache_modifier=".cg"),)
            new_max_X = max_X
            for s in tl.static_range(SPLITS):
                new_max_X = tl.maximum(new_max_X, maxima[s])
            alpha_X = tl.exp2(max_X - new_max_X)
            sum_X, acc_XD, max_X = sum_X * alpha_X, acc_XD * alpha_X[:, None], new_max_X
            for s in tl.static_range(SPLITS):
                weight_X = tl.exp2(maxima[s] - max_X)
                sum_X += sums[s] * weight_X
                acc_XD += accs[s] * weight_X[:, None]
        head_X = kv_head * G + m_X % G
        if sinks is not None:
            max_X, sum_X, alpha_X = _with_sink(max_X, sum_X, tl.load(sinks + head_X, mask=is_real_X, other=0.0))
            acc_XD *= alpha_X[:, None]
        out_X = (first_token + m_X // G).to(tl.int64) * out_token_stride + head_X * out_head_stride
        o_XD = (acc_XD / sum_X[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_X[:, None] + d_D[None, :], o_XD, mask=is_real_X[:, None] & (d_D < D)[None, :])


@triton.jit
def _with_sink(max_M, sum_M, sink_M):
    """A softmax's maximum and sum with one more logit in it, and the factor for what was accumulated so far."""
    sink_M = sink_M.to(tl.float32) * LOG2_E
    new_max_M = tl.maximum(max_M, sink_M)
    alpha_M = tl.exp2(max_M - new_max_M)
    return new_max_M, sum_M * alpha_M + tl.exp2(sink_M - new_max_M), alpha_M
