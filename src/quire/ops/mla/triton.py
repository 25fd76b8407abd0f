"""Latent attention in Triton, for any mix of prefill and decode rows; twin: `ops/mla/reference.py`.

Works through the work lists of `ops/attention/work.py`. Called by `layers/mla.py`; the runner plans the work. All
heads read the same cached vector, as key and as value: a program has as many heads of a token as its registers hold
(`cut_heads`), and reads each vector once for them. Work is planned as if each such tile of heads were a key/value head.
Knows tensors and block tables; nothing of requests, schedulers or models.

Shape letters: T query tokens of the step, H heads, L latent size (a power of two), R size of the rotated part, X = L +
R. In the attention kernel: G heads of a tile, M tile rows (row m is head m % G of its query token m // G), N keys at a
time. In the kernel before it: C heads of a program, P pairs that rotate together. In a product: K inputs, N outputs, M
tokens at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.ops.attention.triton_codes import as_bytes, code_kind, converted, for_codes
from quire.ops.attention.triton_parts import LOG2_E, LOWEST, load_unit, merge
from quire.ops.attention.work import Tile, WorkShape, plan
from quire.ops.elementwise.triton import scaled
from quire.ops.elementwise.triton_rope import place_in_cache
from quire.ops.launch import INTERPRETED, capability, has_little_shared_memory, options, pdl
from quire.ops.mla import reference
from quire.ops.rounding.triton import round_parts

# A split tile is merged this many columns at a time, so that its loads fit in registers.
MERGE_COLUMNS = 128
ROPE_HEADS, ROPE_WARPS = 16, 4
# `head_linear` of up to so many tokens is done here, in tiles of 16 tokens; of more by cuBLAS.
FEW_TOKENS = 64
LINEAR_TILE_BYTES = 16 << 10  # of a weight: a program has them in registers before its input has been computed


def supports(dtype: torch.dtype, latent_size: int, rope_size: int, block_size: int) -> bool:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or block_size < 16:
        return False
    has_rows_of_16_bytes = latent_size in (16, 32, 64, 128, 256, 512) and rope_size % 8 == 0
    return has_rows_of_16_bytes and rope_size <= 128


def cut_heads(dtype: torch.dtype, num_heads: int) -> tuple[int, int]:
    """(tiles of heads, heads of a tile): the planner treats them as key/value heads and the query heads of one."""
    most = 16 if dtype == torch.float32 or has_little_shared_memory() else 64
    heads = next(n for n in range(min(num_heads, most), 0, -1) if num_heads % n == 0)
    return num_heads // heads, heads


def config(dtype: torch.dtype, latent_size: int, group_size: int, *, decode: bool) -> Tile:
    """As `config` of `ops/attention/triton.py`; `group_size` is the number of heads of a tile."""
    lowest = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:  # exactness checks: no tensor cores, speed does not matter
        return Tile(lowest, 16, 4, 1, 2)
    if has_little_shared_memory():
        return Tile(lowest, 32, 4, 2, 2)
    if decode and lowest == 16:
        return Tile(lowest, 32, 4, 3, 2)
    if decode and lowest == 32:
        return Tile(lowest, 32, 8, 3, 2)
    num_keys = 64 if capability() < (10, 0) else 32  # on Blackwell products keep more in shared memory
    return Tile(max(64, lowest), num_keys, 8, 2, 1)


def work_shape(dtype: torch.dtype, num_heads: int, latent_size: int, *, decode: bool) -> WorkShape:
    num_tiles, heads = cut_heads(dtype, num_heads)
    return WorkShape(config(dtype, latent_size, heads, decode=decode), num_tiles, heads, latent_size)


# ---- before attention -----------------------------------------------------------------------------------------------


def norm_rope_and_write(
    q_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions_T: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    interleaved: bool = False,
    scales: Tensor | None = None,
) -> None:
    """As the twin, in one launch. q may be strided along T and H, kv along T."""
    num_tokens, num_heads, rope_size = q_THR.shape
    if num_tokens:
        _norm_rope_and_write_kernel[num_tokens, 1 + triton.cdiv(num_heads, ROPE_HEADS)](
            q_THR,
            kv_TX,
            norm_L,
            eps,
            cos_sin,
            positions_T,
            as_bytes(cache),
            slots_T,
            scales,
            q_THR.stride(0),
            q_THR.stride(1),
            kv_TX.stride(0),
            cache.stride(0),
            0 if scales is None else scales.stride(0),
            H=num_heads,
            L=len(norm_L),
            R=rope_size,
            BLOCK_SIZE=cache.shape[1],
            CODES=code_kind(cache),
            ON_CARD=not INTERPRETED,
            INTERLEAVED=interleaved,
            C=ROPE_HEADS,
            P=triton.next_power_of_2(rope_size // 2),
            PDL=pdl(q_THR),
            num_warps=ROPE_WARPS,
            **options(pdl(q_THR)),
        )


@triton.jit
def _norm_rope_and_write_kernel(
    q,
    kv,
    norm,
    eps,
    cos_sin,
    positions,
    cache,
    slots,
    scales,
    q_token_stride,
    q_head_stride,
    kv_stride,
    cache_stride,
    scales_stride,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ON_CARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each token, the first program does what is cached, and each of the others some heads of q."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    l_L, p_1P = tl.arange(0, L), tl.arange(0, P)[None, :]
    i1_1P = 2 * p_1P if INTERLEAVED else p_1P
    i2_1P = i1_1P + (1 if INTERLEAVED else R // 2)
    norm_L = tl.load(norm + l_L)
    if PDL:
        tl.extra.cuda.gdc_wait()
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * R
    if chunk > 0:
        head_C1 = (chunk - 1) * C + tl.arange(0, C)[:, None]
        x_C1 = q + token * q_token_stride + head_C1 * q_head_stride
        inside_CP = (head_C1 < H) & (p_1P < R // 2)
        y1_CP, y2_CP = _turned(x_C1 + i1_1P, x_C1 + i2_1P, angles, p_1P, inside_CP, R)
        tl.store(x_C1 + i1_1P, y1_CP, inside_CP)
        tl.store(x_C1 + i2_1P, y2_CP, inside_CP)
        return

    slot = tl.load(slots + token).to(tl.int64)
    kv += token * kv_stride
    cache += place_in_cache(slot, cache_stride, BLOCK_SIZE, L + R)
    c_L = tl.load(kv + l_L)
    wide_L = c_L.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide_L * wide_L, 0) / L + eps)
    inside_1P = p_1P < R // 2
    y1_1P, y2_1P = _turned(kv + L + i1_1P, kv + L + i2_1P, angles, p_1P, inside_1P, R)
    c_L = scaled(wide_L, inverse, norm_L, c_L.dtype)
    cached = c_L[None, :], y1_1P, y2_1P
    if CODES is not None:
        dtype: tl.constexpr = kv.dtype.element_ty
        codes_1L, numbers_1L, latent_scale = round_parts((c_L[None, :],), None, dtype, CODES, ON_CARD)
        codes_1P, numbers_1P, rope_scale = round_parts((y1_1P, y2_1P), None, dtype, CODES, ON_CARD)
        c_L, y1_1P, y2_1P = tl.reshape(numbers_1L[0], (L,)), numbers_1P[0], numbers_1P[1]
        cached = codes_1L[0], codes_1P[0], codes_1P[1]
    tl.store(kv + l_L, c_L)
    tl.store(kv + L + i1_1P, y1_1P, inside_1P)
    tl.store(kv + L + i2_1P, y2_1P, inside_1P)
    if slot >= 0:
        tl.store(cache + l_L[None, :], cached[0])
        tl.store(cache + L + i1_1P, cached[1], inside_1P)
        tl.store(cache + L + i2_1P, cached[2], inside_1P)
        if CODES is not None:
            scales_11 = scales + place_in_cache(slot, scales_stride, BLOCK_SIZE, 2) + tl.zeros((1, 1), tl.int32)
            tl.store(scales_11, latent_scale)
            tl.store(scales_11 + 1, rope_scale)


@triton.jit
def _turned(x1_ptr, x2_ptr, angles, p_1P, inside, R: tl.constexpr):
    """Both halves of the pairs, rotated."""
    cos_1P = tl.load(angles + p_1P, p_1P < R // 2, 0.0)
    sin_1P = tl.load(angles + R // 2 + p_1P, p_1P < R // 2, 0.0)
    x1 = tl.load(x1_ptr, inside, 0.0).to(tl.float32)
    x2 = tl.load(x2_ptr, inside, 0.0).to(tl.float32)
    # Several threads hold the same values of a small tile: all must have read before one writes in place.
    tl.debug_barrier()
    return x1 * cos_1P - x2 * sin_1P, x2 * cos_1P + x1 * sin_1P


def head_linear(x_THK: Tensor, weight_HKN: Tensor, out: Tensor | None = None) -> Tensor:
    """As the twin. x and out may have any strides along T and H, the weight along all dimensions."""
    (T, H, K), N = x_THK.shape, weight_HKN.shape[2]
    if T > FEW_TOKENS:
        return reference.head_linear(x_THK, weight_HKN, out)
    out = x_THK.new_empty(T, H, N) if out is None else out
    block_k = max(16, triton.next_power_of_2(K))
    block_n = min(max(16, LINEAR_TILE_BYTES // (block_k * x_THK.itemsize)), max(16, triton.next_power_of_2(N)))
    if T:
        _head_linear_kernel[H, triton.cdiv(N, block_n), triton.cdiv(T, 16)](
            x_THK,
            weight_HKN,
            out,
            T,
            x_THK.stride(0),
            x_THK.stride(1),
            *weight_HKN.stride(),
            out.stride(0),
            out.stride(1),
            K=K,
            N=N,
            BLOCK_M=16,
            BLOCK_K=block_k,
            BLOCK_N=block_n,
            PDL=pdl(x_THK),
            num_warps=4,
            **options(pdl(x_THK)),
        )
    return out


@triton.jit
def _head_linear_kernel(
    x,
    weight,
    out,
    T,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_k_stride,
    weight_n_stride,
    out_token_stride,
    out_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    k_K, n_N = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_M = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight += head * weight_head_stride
    inside_KN = (k_K < K)[:, None] & (n_N < N)[None, :]
    weight_KN = tl.load(weight + k_K[:, None] * weight_k_stride + n_N[None, :] * weight_n_stride, inside_KN, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_M1 = x + head * x_head_stride + m_M.to(tl.int64)[:, None] * x_token_stride
    x_MK = tl.load(x_M1 + k_K[None, :], (m_M < T)[:, None] & (k_K < K)[None, :], 0.0)
    y_MN = tl.dot(x_MK, weight_KN, input_precision="ieee").to(out.dtype.element_ty)
    out_M1 = out + head * out_head_stride + m_M.to(tl.int64)[:, None] * out_token_stride
    tl.store(out_M1 + n_N[None, :], y_MN, (m_M < T)[:, None] & (n_N < N)[None, :])


# ---- attention ------------------------------------------------------------------------------------------------------


def latent_attention(
    q_THL: Tensor,
    q_THR: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As the twin; `scale` is positive. Both parts of q, and out, may be strided along T and H.

    Each of `tables.work` is a launch. These and the block table must be complete before the first kernel of the step
    starts, as they are read before the kernels ahead have finished.
    """
    out = torch.empty(q_THL.shape, dtype=q_THL.dtype, device=q_THL.device) if out is None else out
    (_, H, L), R = q_THL.shape, q_THR.shape[2]
    num_tiles, G = cut_heads(q_THL.dtype, H)
    dependent = pdl(q_THL)
    works = tables.work
    if works is None:
        works = (plan(q_THL, tables, work_shape(q_THL.dtype, H, L, decode=tables.max_query_len == 1)),)
    for work in works:
        _latent_attention[num_tiles, work.units.shape[0]](
            q_THL,
            q_THR,
            as_bytes(cache),
            scales,
            tables.block_table,
            work.units,
            tables.shifts,
            out,
            work.partials,
            work.stats,
            work.counters,
            scale * LOG2_E.value,
            q_THL.stride(0),
            q_THL.stride(1),
            q_THR.stride(0),
            q_THR.stride(1),
            out.stride(0),
            out.stride(1),
            cache.stride(0),
            0 if scales is None else scales.stride(0),
            tables.block_table.stride(0),
            G=G,
            L=L,
            R=R,
            BLOCK_R=max(16, triton.next_power_of_2(R)),
            BLOCK_SIZE=cache.shape[1],
            CODES=code_kind(cache),
            TILE_M=work.tile.tile_m,
            TILE_N=work.tile.tile_n,
            MERGE_COLUMNS=min(MERGE_COLUMNS, L),
            ON_CARD=not INTERPRETED,
            PDL=dependent,
            num_warps=work.tile.num_warps,
            num_stages=work.tile.num_stages,
            **options(dependent),
        )
    return out


@triton.jit
def _scaled_scores(q_MD, q_scale_M, k_ND, scale_N):
    """q k^T, where keys are unscaled codes, and q is `for_codes`."""
    return tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * q_scale_M[:, None] * scale_N[None, :]


@triton.jit
def _latent_attention(
    q_latent,
    q_rope,
    cache,
    scales,
    block_table,
    units,
    shifts,
    out,
    partials,
    stats,
    counters,
    factor,
    latent_token_stride,
    latent_head_stride,
    rope_token_stride,
    rope_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    scales_stride,
    table_stride,
    G: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head_tile, unit = tl.program_id(0), tl.program_id(1)
    row, first_token, num_tokens, pos, begin, end, num_splits, first_unit = load_unit(units, unit)
    # Block ids are loaded one turn of the loop ahead: loaded in the same turn, they would halve the stages of the
    # cache's loads.
    m_M, l_L, r_R, n_N = tl.arange(0, TILE_M), tl.arange(0, L), tl.arange(0, BLOCK_R), tl.arange(0, TILE_N)
    table = block_table + row.to(tl.int64) * table_stride
    block_N = tl.load(table + (begin + n_N) // BLOCK_SIZE, mask=begin + n_N < end, other=0)
    # Programs with nothing to do wait too: the next kernel takes the end of this one as the end of all before it.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_tokens == 0:
        return
    if shifts is not None:
        shift = tl.load(shifts + row)
        pos, begin, end = pos - shift, tl.maximum(begin - shift, 0), end - shift
        block_N = tl.load(table + (begin + n_N) // BLOCK_SIZE, mask=begin + n_N < end, other=0)

    token_M, pos_M = first_token + m_M // G, pos + m_M // G
    head_M = head_tile * G + m_M % G
    is_real_M1 = (m_M < num_tokens * G)[:, None]
    latent_M = token_M.to(tl.int64) * latent_token_stride + head_M.to(tl.int64) * latent_head_stride
    rope_M = token_M.to(tl.int64) * rope_token_stride + head_M.to(tl.int64) * rope_head_stride
    q_ML = tl.load(q_latent + latent_M[:, None] + l_L[None, :], mask=is_real_M1, other=0.0)
    q_MR = tl.load(q_rope + rope_M[:, None] + r_R[None, :], mask=is_real_M1 & (r_R < R)[None, :], other=0.0)
    if CODES is not None:
        q_ML, latent_scale_M = for_codes(q_ML, 1)
        q_MR, rope_scale_M = for_codes(q_MR, 1)
    max_M = tl.full((TILE_M,), LOWEST, tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    acc_ML = tl.zeros((TILE_M, L), tl.float32)
    for start in range(begin, end, TILE_N):
        key_N = start + n_N
        in_range_N1 = (key_N < end)[:, None]
        vector_N = block_N.to(tl.int64) * block_stride + key_N % BLOCK_SIZE * (L + R)
        scale_N = block_N.to(tl.int64) * scales_stride + key_N % BLOCK_SIZE * 2
        block_N = tl.load(table + (key_N + TILE_N) // BLOCK_SIZE, mask=key_N + TILE_N < end, other=0)
        c_NL = tl.load(cache + vector_N[:, None] + l_L[None, :], mask=in_range_N1, other=0)
        k_NR = tl.load(cache + vector_N[:, None] + (L + r_R)[None, :], mask=in_range_N1 & (r_R < R)[None, :], other=0)
        if CODES is None:
            s_MN = tl.dot(q_MR, tl.trans(k_NR), input_precision="ieee")
            s_MN = tl.dot(q_ML, tl.trans(c_NL), s_MN, input_precision="ieee")
        else:
            k_scale_N = tl.load(scales + scale_N + 1, mask=key_N < end, other=0.0)
            c_scale_N = tl.load(scales + scale_N, mask=key_N < end, other=1.0)
            c_NL = converted(c_NL, CODES, q_ML.dtype, ON_CARD)
            s_MN = _scaled_scores(q_MR, rope_scale_M, converted(k_NR, CODES, q_ML.dtype, ON_CARD), k_scale_N)
            s_MN += _scaled_scores(q_ML, latent_scale_M, c_NL, c_scale_N)
        if start + TILE_N > tl.minimum(end, pos + 1):  # else all queries see all these keys
            visible_MN = (key_N[None, :] <= pos_M[:, None]) & (key_N < end)[None, :]
            s_MN = tl.where(visible_MN, s_MN, float("-inf"))
        s_MN *= factor
        if CODES is None:
            new_max_M = tl.maximum(max_M, tl.max(s_MN, 1))
        else:  # so that probabilities times scales, by which codes are multiplied, are at most 1
            new_max_M = tl.maximum(max_M, tl.max(s_MN + tl.log2(c_scale_N)[None, :], 1))
        p_MN = tl.exp2(s_MN - new_max_M[:, None])
        alpha_M = tl.exp2(max_M - new_max_M)
        max_M = new_max_M
        sum_M = sum_M * alpha_M + tl.sum(p_MN, 1)
        if CODES is not None:
            p_MN *= c_scale_N[None, :]
        acc_ML = tl.dot(p_MN.to(c_NL.dtype), c_NL, acc_ML * alpha_M[:, None], input_precision="ieee")

    if num_splits == 1:
        out_M = token_M.to(tl.int64) * out_token_stride + head_M.to(tl.int64) * out_head_stride
        o_ML = (acc_ML / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_M[:, None] + l_L[None, :], o_ML, mask=is_real_M1)
        return

    # Split: store the partial result. The last split to finish merges all of them, in the order of their keys.
    num_tiles = tl.num_programs(0)
    place = (unit * num_tiles + head_tile).to(tl.int64)
    tl.store(stats + place * (2 * TILE_M) + m_M, max_M)
    tl.store(stats + place * (2 * TILE_M) + TILE_M + m_M, sum_M)
    partial_M = partials + place * (TILE_M * L) + m_M * L
    tl.store(partial_M[:, None] + l_L[None, :], acc_ML, mask=is_real_M1, cache_modifier=".cg")
    tl.debug_barrier()  # one thread does the atomic below, which must publish what all threads have stored
    counter = counters + first_unit * num_tiles + head_tile
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != num_splits - 1:
        return
    tl.store(counter, 0)
    for column in range(0, L, MERGE_COLUMNS):
        merge(
            out + column,
            None,
            partials + column,
            stats,
            first_unit,
            num_splits,
            head_tile,
            first_token,
            num_tokens,
            out_token_stride,
            out_head_stride,
            G,
            L,
            MERGE_COLUMNS,
            TILE_M,
        )
