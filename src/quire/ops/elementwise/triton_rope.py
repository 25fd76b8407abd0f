"""RoPE and the write into the KV cache, in one launch; twin: `rope_and_write` of `reference.py`."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention.triton_codes import as_bytes, code_kind
from quire.ops.elementwise.triton import PER_THREAD, scaled
from quire.ops.launch import INTERPRETED, options, pdl
from quire.ops.rounding.triton import round_parts


def rope_config(num_tokens: int, num_pairs: int) -> tuple[int, int]:
    """(heads of a program, warps).

    The number of heads per warp is fixed, and with it how a head is distributed over threads and summed.
    """
    num_warps = 1 if num_tokens <= 32 else 2
    return num_warps * max(32 * PER_THREAD // num_pairs, 1), num_warps


def rope_and_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    interleaved: bool = False,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
    fixed_scales: tuple[float, float] | None = None,
    key_center_KD: Tensor | None = None,
) -> None:
    """As the twin, in one launch; norm weights are given for both q and k or for neither.

    `cache` has the twin's shape, [blocks, 2, block_size, K, D]; inside a block, its bytes are in the order of
    `ops/attention/triton.py`, or of `triton_codes.py` beside it.
    """
    num_tokens, num_heads, head_size = q_THD.shape
    num_kv_heads, rotary_dim = k_TKD.shape[1], cos_sin.shape[1]
    num_pairs = triton.next_power_of_2(rotary_dim // 2)
    heads, num_warps = rope_config(num_tokens, num_pairs)
    grid = num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if num_tokens:
        _rope_and_write_kernel[grid](
            q_THD,
            k_TKD,
            v_TKD,
            cos_sin,
            positions_T,
            as_bytes(cache),
            slots_T,
            scales,
            q_norm_D,
            k_norm_D,
            eps,
            *(fixed_scales or (None, None)),
            key_center_KD,
            q_THD.stride(0),
            k_TKD.stride(0),
            v_TKD.stride(0),
            cache.stride(0),
            0 if scales is None else scales.stride(0),
            H=num_heads,
            K=num_kv_heads,
            D=head_size,
            ROTARY=rotary_dim,
            BLOCK_SIZE=cache.shape[2],
            INTERLEAVED=interleaved,
            CODES=code_kind(cache),
            ON_CARD=not INTERPRETED,
            C=heads,
            P=num_pairs,
            PDL=pdl(q_THD),
            num_warps=num_warps,
            **options(pdl(q_THD)),
        )


@triton.jit
def _rope_and_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    slots_ptr,
    scales_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    fixed_k_scale,
    fixed_v_scale,
    key_center_ptr,
    q_stride,
    k_stride,
    v_stride,
    cache_stride,
    scales_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODES: tl.constexpr,
    ON_CARD: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has some heads of one token: the first programs heads of q, the next ones of k, the last ones of v."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    Q_CHUNKS: tl.constexpr = (H + C - 1) // C
    K_CHUNKS: tl.constexpr = (K + C - 1) // C
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c_C1 = tl.arange(0, C)[:, None]
    if chunk < Q_CHUNKS:
        head_C1 = chunk * C + c_C1
        _turn(
            q_ptr + token * q_stride + head_C1 * D,
            head_C1 < H,
            q_norm_ptr,
            eps,
            cos_sin_ptr,
            positions_ptr + token,
            None,
            None,
            None,
            None,
            None,
            cache_stride,
            scales_stride,
            D,
            ROTARY,
            BLOCK_SIZE,
            INTERLEAVED,
            None,
            ON_CARD,
            P,
            PDL,
        )
    elif chunk < Q_CHUNKS + K_CHUNKS:
        head_C1 = (chunk - Q_CHUNKS) * C + c_C1
        _turn(
            k_ptr + token * k_stride + head_C1 * D,
            head_C1 < K,
            k_norm_ptr,
            eps,
            cos_sin_ptr,
            positions_ptr + token,
            None if key_center_ptr is None else key_center_ptr + head_C1 * D,
            cache_ptr + head_C1 * (BLOCK_SIZE * D),
            slots_ptr + token,
            None if CODES is None else scales_ptr + head_C1 * BLOCK_SIZE,
            fixed_k_scale,
            cache_stride,
            scales_stride,
            D,
            ROTARY,
            BLOCK_SIZE,
            INTERLEAVED,
            CODES,
            ON_CARD,
            P,
            PDL,
        )
    else:
        head_C1 = (chunk - Q_CHUNKS - K_CHUNKS) * C + c_C1
        i_1D = tl.arange(0, triton.next_power_of_2(D))[None, :]
        inside = (head_C1 < K) & (i_1D < D)
        if PDL:
            tl.extra.cuda.gdc_wait()
        v_at = v_ptr + token * v_stride + head_C1 * D + i_1D
        v_CD = tl.load(v_at, inside, 0.0)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if CODES is not None:
            codes, numbers, scale_C1 = round_parts((v_CD,), fixed_v_scale, v_CD.dtype, CODES, ON_CARD)
            tl.debug_barrier()  # numbers may have been loaded by two threads, for rounding and for the cache
            tl.store(v_at, numbers[0], inside)
            v_CD = codes[0]
            scale_at = scales_ptr + (K + head_C1) * BLOCK_SIZE + place_in_cache(slot, scales_stride, BLOCK_SIZE, 1)
            tl.store(scale_at, scale_C1, (head_C1 < K) & (slot >= 0))
        # Of codes, neighbouring tokens lie side by side; else neighbouring numbers of a token.
        VECTOR: tl.constexpr = D if CODES is None else 1
        to_C1 = cache_ptr + (K + head_C1) * (BLOCK_SIZE * D) + place_in_cache(slot, cache_stride, BLOCK_SIZE, VECTOR)
        tl.store(to_C1 + i_1D * (1 if CODES is None else BLOCK_SIZE), v_CD, inside & (slot >= 0))


@triton.jit
def place_in_cache(slot, cache_stride, BLOCK_SIZE: tl.constexpr, D: tl.constexpr):
    """The offset of a slot from the first token of block 0, int64 as is `slot`."""
    return slot // BLOCK_SIZE * cache_stride + slot % BLOCK_SIZE * D


@triton.jit
def _turn(
    x_C1,
    inside_C1,
    norm_ptr,
    eps,
    cos_sin_ptr,
    position_ptr,
    center_C1,
    cache_C1,
    slot_ptr,
    scales_C1,
    fixed_scale,
    cache_stride,
    scales_stride,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODES: tl.constexpr,
    ON_CARD: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms and rotates the heads at the pointers `x_C1`, in place, and writes them to the cache, where there is one.

    With CODES they are rounded, in place too. Of keys the center, if there is one, is subtracted before.

    A head is three tiles: the first numbers of all pairs, the second ones, and the part that is not rotated.
    """
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = D - ROTARY
    # As wide as the heads, so that the threads that need weights, cosines and sines load them, not through shared
    # memory.
    p_CP = tl.broadcast_to(tl.arange(0, P)[None, :], (inside_C1.shape[0], P))
    i1_CP = 2 * p_CP if INTERLEAVED else p_CP
    i2_CP = i1_CP + (1 if INTERLEAVED else HALF)
    inside_CP = inside_C1 & (p_CP < HALF)
    # At least as wide as P: the tile then has an element for each thread, so that no two threads hold the same element,
    # and none reads what another has written already.
    i3_1R = ROTARY + tl.arange(0, max(triton.next_power_of_2(REST), P))[None, :]
    inside_CR = inside_C1 & (i3_1R < D)
    if norm_ptr is not None:
        weight1, weight2 = tl.load(norm_ptr + i1_CP, p_CP < HALF, 0.0), tl.load(norm_ptr + i2_CP, p_CP < HALF, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    position = tl.load(position_ptr).to(tl.int64)
    x1, x2 = tl.load(x_C1 + i1_CP, inside_CP, 0.0), tl.load(x_C1 + i2_CP, inside_CP, 0.0)
    if REST > 0:
        x3 = tl.load(x_C1 + i3_1R, inside_CR, 0.0)
    if cache_C1 is not None:
        slot = tl.load(slot_ptr).to(tl.int64)
        to_C1 = cache_C1 + place_in_cache(slot, cache_stride, BLOCK_SIZE, D)
    cos = tl.load(cos_sin_ptr + position * ROTARY + p_CP, p_CP < HALF, 0.0)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + p_CP, p_CP < HALF, 0.0)

    if norm_ptr is not None:
        wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
        squares = tl.sum(wide1 * wide1 + wide2 * wide2, 1, keep_dims=True)
        if REST > 0:
            wide3 = x3.to(tl.float32)
            squares += tl.sum(wide3 * wide3, 1, keep_dims=True)
        inverse = tl.rsqrt(squares / D + eps)
        x1, x2 = scaled(wide1, inverse, weight1, x1.dtype), scaled(wide2, inverse, weight2, x2.dtype)
        if REST > 0:
            x3 = scaled(wide3, inverse, tl.load(norm_ptr + i3_1R, i3_1R < D, 0.0), x3.dtype)
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    x1, x2 = wide1 * cos - wide2 * sin, wide2 * cos + wide1 * sin
    parts = (x1, x2, x3) if REST > 0 else (x1, x2)
    places = (i1_CP, i2_CP, i3_1R) if REST > 0 else (i1_CP, i2_CP)
    insides = (inside_CP, inside_CP, inside_CR) if REST > 0 else (inside_CP, inside_CP)
    if center_C1 is not None:
        moved: tl.tuple = ()
        for i in tl.static_range(len(parts)):
            turned = parts[i].to(x_C1.dtype.element_ty).to(tl.float32)
            moved += (turned - tl.load(center_C1 + places[i], insides[i], 0.0),)
        parts = moved
    cached = parts
    if CODES is not None:
        cached, parts, scale_C1 = round_parts(parts, fixed_scale, x_C1.dtype.element_ty, CODES, ON_CARD)
        tl.debug_barrier()  # numbers may have been loaded by two threads, for rounding and for the cache
        tl.store(scales_C1 + place_in_cache(slot, scales_stride, BLOCK_SIZE, 1), scale_C1, inside_C1 & (slot >= 0))
    for i in tl.static_range(len(parts)):
        tl.store(x_C1 + places[i], parts[i], insides[i])
        if cache_C1 is not None:
            tl.store(to_C1 + places[i], cached[i], insides[i] & (slot >= 0))
