"""Paged attention over a cache of 8-bit codes in Triton, called by `paged_attention` of `triton.py`.

Tensor cores multiply codes as they are: nothing is converted. Their other factor must then have 8 bits, too: queries
and probabilities are cut in two parts of 8 bits each (`in_parts`), which are neighbouring columns of one product, and
whose sum is as exact as a bfloat16. Small groups of heads leave most columns of a product unused anyway.

All is transposed, scores are k q^T [N, M], outputs v^T p [D, M], so that codes are the first factor, which tensor cores
take from shared memory, where asynchronous loads put them. They add up neighbours: for this, the values of a block lie
[K, D, block_size] (`values_view`). Keys lie [K, block_size, D], as in other caches, and behind both the scales, [2, K,
block_size], which multiply scores and probabilities, not elements.

Shape letters and work lists are those of `triton.py`. Models in float32 multiply float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton_parts import LOG2_E, LOWEST, finish, load_unit
from quire.ops.attention.work import AttentionWork, Tile
from quire.ops.launch import INTERPRETED, capability, has_little_shared_memory, options, pdl
from quire.ops.rounding.triton import largest_code, nearest, to_code

ALIGNED = tl.constexpr(16)  # keys are read from multiples of it, in which the tokens of a block are side by side


def config(dtype: torch.dtype, head_size: int, group_size: int, *, decode: bool) -> Tile:
    """As that of `triton.py`; a product has two columns for each row of a tile, and wants 64 keys."""
    lowest = max(8, triton.next_power_of_2(group_size))
    if dtype == torch.float32:  # exactness checks: no tensor cores, speed does not matter
        return Tile(max(16, lowest), 32, 4, 2, 4)
    num_stages = 2 if has_little_shared_memory() or head_size > 128 else 3
    if decode:
        return Tile(lowest, 64, 4, num_stages, 4)
    return Tile(max(32, lowest), 64, 4, 2, 2)


def why_no_codes(cache_dtype: torch.dtype) -> str | None:
    """Why kernels cannot read such a cache on the card at hand, or None."""
    if cache_dtype == torch.float8_e4m3fn and capability() < (8, 9):
        return "this card has no float8: --kv-cache-dtype int8 is fast"
    return None


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
        cache,
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
        ON_CARD=not INTERPRETED,
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
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    PART: tl.constexpr = min(BLOCK_D, TILE_N)
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

    m_M, d_D = tl.arange(0, TILE_M), tl.arange(0, BLOCK_D)
    token_M, head_M, pos_M = first_token + m_M // G, kv_head * G + m_M % G, pos + m_M // G
    is_real_DM = (d_D < D)[:, None] & (m_M < num_tokens * G)[None, :]
    q_M = token_M.to(tl.int64) * q_token_stride + head_M * q_head_stride
    q_DM = tl.load(q + d_D[:, None] + q_M[None, :], mask=is_real_DM, other=0.0)
    largest_M = tl.maximum(tl.max(tl.abs(q_DM.to(tl.float32)), 0), 1e-30)
    q_parts = in_parts(q_DM, largest_code(CODES) / largest_M[None, :], CODES, ON_CARD, q_DM.dtype == tl.float32)
    factor_M = factor * (largest_M / largest_code(CODES))
    K = tl.num_programs(0)
    keys = cache + kv_head * (BLOCK_SIZE * D)
    values = cache + (K + kv_head) * (BLOCK_SIZE * D)
    scales += kv_head * BLOCK_SIZE
    table = block_table + row.to(tl.int64) * table_stride

    # Tiles of keys that all queries see, and those before and behind, of which some queries must not see some keys.
    STEP: tl.constexpr = BLOCK_SIZE if TILE_N % BLOCK_SIZE == 0 else ALIGNED
    first = begin // STEP * STEP
    first_seen = tl.maximum(begin, pos + num_tokens - WINDOW) if WINDOW else begin
    full_begin = first + (tl.maximum(first_seen - first, 0) + TILE_N - 1) // TILE_N * TILE_N
    full_end = full_begin + tl.maximum(tl.minimum(end, pos + 1) - full_begin, 0) // TILE_N * TILE_N
    num_before = (tl.minimum(full_begin, end) - first + TILE_N - 1) // TILE_N
    num_partial = num_before + (tl.maximum(end - full_end, 0) + TILE_N - 1) // TILE_N
    max_M = tl.full((TILE_M,), LOWEST, tl.float32)
    sum_NM = tl.zeros((TILE_N, TILE_M), tl.float32)
    accs: tl.tuple = ()
    for _ in tl.static_range(BLOCK_D // PART):
        accs += (tl.zeros((PART, TILE_M), tl.float32),)
    n_N = tl.arange(0, TILE_N)
    # Block ids are loaded one turn of the loop ahead: loaded in the same turn, they would halve its stages.
    next_N = tl.load(table + (full_begin + n_N) // BLOCK_SIZE, mask=full_begin + n_N < full_end, other=0)
    for start in range(full_begin, full_end, TILE_N):
        block_N = next_N
        key_N = start + TILE_N + n_N
        next_N = tl.load(table + key_N // BLOCK_SIZE, mask=key_N < full_end, other=0)
        max_M, sum_NM, accs = _add_tile(
            max_M, sum_NM, accs, q_parts, factor_M, keys, values, scales, start, block_N, pos_M, begin, end, K,
            block_stride, scales_stride, D, BLOCK_SIZE, CODES, WINDOW, SOFTCAP, ON_CARD, IS_FULL=True,
        )  # fmt: skip
    for i in tl.range(num_partial, num_stages=1):
        start = tl.where(i < num_before, first + i * TILE_N, full_end + (i - num_before) * TILE_N)
        key_N = start + n_N
        block_N = tl.load(table + key_N // BLOCK_SIZE, mask=key_N < end, other=0)
        max_M, sum_NM, accs = _add_tile(
            max_M, sum_NM, accs, q_parts, factor_M, keys, values, scales, start, block_N, pos_M, begin, end, K,
            block_stride, scales_stride, D, BLOCK_SIZE, CODES, WINDOW, SOFTCAP, ON_CARD, IS_FULL=False,
        )  # fmt: skip

    finish(
        _whole(accs),
        max_M,
        tl.sum(sum_NM, 0),
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
def _add_tile(
    max_M,
    sum_NM,
    accs,
    q_parts,
    factor_M,
    keys,
    values,
    scales,
    start,
    block_N,
    pos_M,
    begin,
    end,
    K,
    block_stride,
    scales_stride,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ON_CARD: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """The state of a softmax and of the sum of values, with some more keys. `IS_FULL`: all queries see all of them.

    `max_M` is at least the largest weight of a value's codes, a probability times a scale.
    """
    NUM_PARTS: tl.constexpr = len(accs)
    PART: tl.constexpr = accs[0].shape[0]
    d_D = tl.arange(0, NUM_PARTS * PART)
    n_N = tl.arange(0, sum_NM.shape[0])
    key_N = start + n_N
    inside_N = (key_N >= begin) & (key_N < end)
    in_block_N = (n_N if sum_NM.shape[0] % BLOCK_SIZE == 0 else key_N) % BLOCK_SIZE  # tiles begin with a block
    place_N = block_N.to(tl.int64) * block_stride
    scale_N = block_N.to(tl.int64) * scales_stride + in_block_N
    keys_ND = keys + (place_N + in_block_N * D)[:, None] + d_D[None, :]
    k_ND = tl.load(keys_ND, mask=(d_D < D)[None, :] if IS_FULL else inside_N[:, None] & (d_D < D)[None, :], other=0.0)
    if IS_FULL:
        key_scale_N = tl.load(scales + scale_N)
        value_scale_N = tl.load(scales + scale_N + K * BLOCK_SIZE)
    else:
        key_scale_N = tl.load(scales + scale_N, mask=inside_N, other=0.0)
        value_scale_N = tl.load(scales + scale_N + K * BLOCK_SIZE, mask=inside_N, other=1.0)
    s_NM = of_parts(k_ND, q_parts, CODES) * key_scale_N[:, None] * factor_M[None, :]
    if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        s_NM = SOFTCAP * LOG2_E * (1 - 2 / (tl.exp2(s_NM * (2 / SOFTCAP)) + 1))
    if not IS_FULL:
        visible_NM = (key_N[:, None] <= pos_M[None, :]) & inside_N[:, None]
        if WINDOW:
            visible_NM &= key_N[:, None] > pos_M[None, :] - WINDOW
        s_NM = tl.where(visible_NM, s_NM, float("-inf"))
    # Weights are relative to the largest of these keys, so that 8 bits are enough where those of others are far larger.
    exponent_N = (value_scale_N.to(tl.int32, bitcast=True) >> 23) - 126  # a power of two above the scale
    tile_max_M = tl.maximum(tl.max(s_NM + exponent_N.to(tl.float32)[:, None], 0), LOWEST)
    new_max_M = tl.maximum(max_M, tile_max_M)
    alpha_M, beta_M = tl.exp2(max_M - new_max_M), tl.exp2(tile_max_M - new_max_M)
    p_NM = tl.exp2(s_NM - tile_max_M[None, :])
    sum_NM = sum_NM * alpha_M[None, :] + p_NM * beta_M[None, :]
    LARGEST: tl.constexpr = largest_code(CODES)
    p_parts = in_parts(p_NM, (value_scale_N * LARGEST)[:, None], CODES, ON_CARD, q_parts.dtype == tl.float32)
    # Sixteen keys from a multiple of sixteen on are one piece of a block, which the compiler cannot know.
    piece_N = tl.max_contiguous(tl.multiple_of(place_N + in_block_N, ALIGNED), ALIGNED)
    added: tl.tuple = ()
    for part in tl.static_range(NUM_PARTS):
        d_P = part * PART + tl.arange(0, PART)
        v_PN = tl.load(values + (d_P * BLOCK_SIZE)[:, None] + piece_N[None, :], mask=(d_P < D)[:, None], other=0.0)
        if not IS_FULL:
            v_PN = _masked(v_PN, inside_N, ON_CARD)
        added += (accs[part] * alpha_M[None, :] + of_parts(v_PN, p_parts, CODES) * (beta_M / LARGEST)[None, :],)
    return new_max_M, sum_NM, added


@triton.jit
def _masked(v_PN, inside_N, ON_CARD: tl.constexpr):
    """Zeros where a key is not inside: what is there may be a NaN. Loads with such a mask would be of single bytes."""
    if ON_CARD:  # four at a time
        bytes_PN = v_PN.to(tl.uint8, bitcast=True)
        mask_PN = tl.broadcast_to(tl.where(inside_N, 255, 0).to(tl.uint8)[None, :], v_PN.shape)
        bytes_PN = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [bytes_PN, mask_PN], dtype=tl.uint8, is_pure=True, pack=4
        )
        return bytes_PN.to(v_PN.dtype, bitcast=True)
    else:
        return tl.where(inside_N[None, :], v_PN, tl.zeros_like(v_PN))


@triton.jit
def _whole(parts):
    """[M, D], from parts [D / 1, 2, 4 …, M]."""
    NUM_PARTS: tl.constexpr = len(parts)
    if NUM_PARTS == 1:
        return tl.trans(parts[0])
    else:
        both = tl.join(_whole(parts[: NUM_PARTS // 2]), _whole(parts[NUM_PARTS // 2 :]))
        return tl.reshape(tl.permute(both, (0, 2, 1)), (both.shape[0], 2 * both.shape[1]))


# ---- numbers in parts of 8 bits --------------------------------------------------------------------------------------


@triton.constexpr_function
def low_steps(codes):
    """How much smaller the second part's unit is: what the first part leaves is at most half of its own unit."""
    return 254.0 if codes == "int8" else 16.0


@triton.jit
def in_parts(x_KM, factors, CODES: tl.constexpr, ON_CARD: tl.constexpr, IS_EXACT: tl.constexpr = False):
    """x times factors, none larger than a code, as columns that codes can be multiplied by: two for each of x.

    `IS_EXACT`: as float32, in one column.
    """
    K: tl.constexpr = x_KM.shape[0]
    M: tl.constexpr = x_KM.shape[1]
    high = x_KM.to(tl.float32) * factors
    if IS_EXACT:
        return high
    else:
        low = (high - nearest(high, CODES)) * low_steps(CODES)
        return to_code(tl.reshape(tl.join(high, low), (K, 2 * M)), CODES, ON_CARD)


@triton.jit
def of_parts(codes_NK, parts, CODES: tl.constexpr):
    """The product of codes with what was cut in parts."""
    if parts.dtype == tl.float32:
        return tl.dot(code_values(codes_NK, CODES, tl.float32), parts, input_precision="ieee")
    else:
        both = tl.dot(codes_NK, parts).to(tl.float32)
        high, low = tl.split(tl.reshape(both, (both.shape[0], both.shape[1] // 2, 2)))
        return high + low * (1 / low_steps(CODES))


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


# Four codes in a register as float16 in two. A byte b, its highest bit turned, behind 0x64 is the float16 1152 + b.
E4M3_TO_HALF = tl.constexpr("""
{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
INT8_TO_HALF = tl.constexpr("""
{
.reg .b32 turned, offset;
xor.b32 turned, $2, 0x80808080;
mov.b32 offset, 0x64806480;
prmt.b32 $0, turned, 0x64, 0x4140;
prmt.b32 $1, turned, 0x64, 0x4342;
sub.f16x2 $0, $0, offset;
sub.f16x2 $1, $1, offset;
}
""")


@triton.jit
def converted(codes, CODES: tl.constexpr, DTYPE: tl.constexpr, ON_CARD: tl.constexpr):
    """As `code_values`, by instructions that the compiler does not move: they are converted as they were loaded. It
    would have operands of products converted once for each product, and read bytes one by one for that."""
    if DTYPE == tl.float16 and ON_CARD:
        ASM: tl.constexpr = E4M3_TO_HALF if CODES == "e4m3" else INT8_TO_HALF
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)
    else:
        return code_values(codes, CODES, DTYPE)


@triton.jit
def code_values(codes, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """What codes stand for, before they are scaled."""
    if CODES == "e4m3":
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(DTYPE)
