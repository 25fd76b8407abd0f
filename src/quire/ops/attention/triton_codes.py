"""Paged attention over a cache of 8-bit codes in Triton, called by `paged_attention` of `triton.py`.

All is transposed: scores are k q^T [N, M], outputs v^T p [D, M]. So codes are always the first factor of a product,
which tensor cores take from registers, where codes are converted. For this, the values of a block lie [K, D,
block_size] (`values_view`): neighbouring tokens, which a product adds up, side by side. Keys lie [K, block_size, D], as
in other caches, and behind both the scales, [2, K, block_size], which multiply scores and probabilities, not elements.

Shape letters and work lists are those of `triton.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton_parts import LOG2_E, LOWEST, finish, load_unit
from quire.ops.attention.work import AttentionWork
from quire.ops.launch import options, pdl

ALIGNED = tl.constexpr(16)  # keys are read from multiples of it, in which the tokens of a block are side by side


def code_kind(cache: Tensor) -> str | None:
    """How kernels read a cache's bytes; None: they are no codes."""
    return {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(cache.dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """Kernels read and write float8 codes as bytes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def values_view(cache: Tensor) -> Tensor:
    """The values of a cache [blocks, 2, block_size, K, D] of codes as they lie: [blocks, K, D, block_size]."""
    num_blocks, _, size, K, D = cache.shape
    first = cache.storage_offset() + K * size * D
    return cache.as_strided((num_blocks, K, D, size), (cache.stride(0), D * size, size, 1), first)


def launch(
    q_THD: Tensor,
    cache: Tensor,
    scales: Tensor,
    tables: AttentionTables,
    work: AttentionWork,
    out: Tensor,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
    softcap: float,
) -> None:
    (_, H, D), (_, _, block_size, K, _) = q_THD.shape, cache.shape
    dependent = pdl(q_THD)
    _coded_attention[K, work.units.shape[0]](
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
        scales.stride(0),
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


@triton.jit
def _coded_attention(
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
    # Programs with nothing to do wait too: the next kernel takes the end of this one as the end of all before it.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_tokens == 0:
        return
    if shifts is not None:
        shift = tl.load(shifts + row)
        pos, begin, end = pos - shift, tl.maximum(begin - shift, 0), end - shift

    m_M, d_D, n_N = tl.arange(0, TILE_M), tl.arange(0, BLOCK_D), tl.arange(0, TILE_N)
    token_M, head_M, pos_M = first_token + m_M // G, kv_head * G + m_M % G, pos + m_M // G
    is_real_DM = (d_D < D)[:, None] & (m_M < num_tokens * G)[None, :]
    q_M = token_M.to(tl.int64) * q_token_stride + head_M * q_head_stride
    q_DM, q_scale_M = for_codes(tl.load(q + d_D[:, None] + q_M[None, :], mask=is_real_DM, other=0.0), 0)
    K = tl.num_programs(0)
    keys = cache + kv_head * (BLOCK_SIZE * D) + d_D[None, :]
    values = cache + (K + kv_head) * (BLOCK_SIZE * D) + d_D[:, None] * BLOCK_SIZE
    scales += kv_head * BLOCK_SIZE
    table = block_table + row.to(tl.int64) * table_stride
    first = begin // ALIGNED * ALIGNED
    # Block ids are loaded one turn of the loop ahead: loaded in the same turn, they would halve the stages of K and V.
    block_N = tl.load(table + (first + n_N) // BLOCK_SIZE, mask=first + n_N < end, other=0)
    max_M = tl.full((TILE_M,), LOWEST, tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    acc_DM = tl.zeros((BLOCK_D, TILE_M), tl.float32)
    for start in range(first, end, TILE_N):
        key_N = start + n_N
        inside_N = (key_N >= begin) & (key_N < end)
        place_N = block_N.to(tl.int64) * block_stride
        scale_N = block_N.to(tl.int64) * scales_stride + key_N % BLOCK_SIZE
        block_N = tl.load(table + (key_N + TILE_N) // BLOCK_SIZE, mask=key_N + TILE_N < end, other=0)
        k_ND = tl.load(
            keys + (place_N + key_N % BLOCK_SIZE * D)[:, None], mask=inside_N[:, None] & (d_D < D)[None, :], other=0
        )
        key_scale_N = tl.load(scales + scale_N, mask=inside_N, other=0.0)
        s_NM = tl.dot(code_values(k_ND, CODES, q_DM.dtype), q_DM, input_precision="ieee")
        s_NM *= key_scale_N[:, None] * q_scale_M[None, :]
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
            s_NM = SOFTCAP * LOG2_E * (1 - 2 / (tl.exp2(s_NM * (factor * 2 / SOFTCAP)) + 1))
        # Whether some query must not see some of these keys.
        is_partly_hidden = (start < begin) | (start + TILE_N > tl.minimum(end, pos + 1))
        if WINDOW:
            is_partly_hidden |= start < pos + num_tokens - WINDOW
        if is_partly_hidden:
            visible_NM = (key_N[:, None] <= pos_M[None, :]) & inside_N[:, None]
            if WINDOW:
                visible_NM &= key_N[:, None] > pos_M[None, :] - WINDOW
            s_NM = tl.where(visible_NM, s_NM, float("-inf"))
        s_factor = 1.0 if SOFTCAP > 0 else factor
        new_max_M = tl.maximum(max_M, tl.max(s_NM, 0) * s_factor)
        p_NM = tl.exp2(s_NM * s_factor - new_max_M[None, :])
        alpha_M = tl.exp2(max_M - new_max_M)
        max_M = new_max_M
        sum_M = sum_M * alpha_M + tl.sum(p_NM, 0)
        # Sixteen keys from a multiple of sixteen on are one piece of a block, which the compiler cannot know.
        piece_N = tl.max_contiguous(tl.multiple_of(place_N + key_N % BLOCK_SIZE, ALIGNED), ALIGNED)
        v_DN = tl.load(values + piece_N[None, :], mask=(d_D < D)[:, None], other=0)
        if is_partly_hidden:  # a mask along keys would make the loads single bytes
            v_DN = tl.where(inside_N[None, :], v_DN, 0)
        value_scale_N = tl.load(scales + scale_N + K * BLOCK_SIZE, mask=inside_N, other=0.0)
        largest = tl.maximum(tl.max(value_scale_N, 0), 1e-30)  # so that probabilities times scales fit float16
        p_NM = (p_NM * (value_scale_N / largest)[:, None]).to(q_DM.dtype)
        o_DM = tl.dot(code_values(v_DN, CODES, q_DM.dtype), p_NM, input_precision="ieee")
        acc_DM = acc_DM * alpha_M[None, :] + o_DM * largest

    finish(
        tl.trans(acc_DM),
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


@triton.jit
def for_codes(q, AXIS: tl.constexpr):
    """(q to be multiplied by codes, a scale of each vector along AXIS). All codes are exact in float16, and scaled, all
    numbers fit."""
    if q.dtype == tl.float32:
        scale = tl.max(tl.zeros_like(q), AXIS) + 1.0
    else:
        wide = q.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), AXIS), 1e-30)
        q = (wide / tl.expand_dims(scale, AXIS)).to(tl.float16)
    return q, scale


@triton.jit
def code_values(codes, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """What codes stand for, before they are scaled."""
    if CODES == "e4m3":
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(DTYPE)
