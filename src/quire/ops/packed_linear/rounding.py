"""Inputs rounded to 8 bits inside a kernel, in Triton; twin: `round_rows` in `words.py`.

Used by `triton.py`, whose programs round a row themselves, and by `rows.py`. Knows tensors only.
"""

import triton
import triton.language as tl

from quire.ops.packed_linear.decode import load_row
from quire.ops.packed_linear.words import TINY

TINY_INPUT = tl.constexpr(TINY)


@triton.jit
def round_row(
    row_ptr,
    input_scale,
    K: tl.constexpr,
    KIND: tl.constexpr,
    X_GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """(chunks of a row of inputs as codes [1, BLOCK_W], chunk by chunk the scales of their lanes [1, lanes])."""
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
    R: tl.constexpr = BLOCK_W // LANE
    chunks: tl.tuple = ()
    bounds: tl.tuple = ()  # the largest number that shares a scale, by lane
    for c in tl.static_range(CHUNKS):
        k_1W = c * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
        x = load_row(row_ptr, k_1W, K, BLOCK_W).to(tl.float32)
        lanes_1R = tl.max(tl.reshape(tl.abs(x), (1, R, LANE)), 2)
        if X_GROUP is not None:
            groups = tl.max(tl.reshape(lanes_1R, (R * LANE // X_GROUP, X_GROUP // LANE)), 1)
            lanes_1R = tl.reshape(tl.broadcast_to(groups[:, None], (R * LANE // X_GROUP, X_GROUP // LANE)), (1, R))
        chunks += (x,)
        bounds += (lanes_1R,)
    if X_GROUP is None:
        largest = tl.max(bounds[0])
        for c in tl.static_range(1, CHUNKS):
            largest = tl.maximum(largest, tl.max(bounds[c]))
        if input_scale is not None:
            largest = input_scale * LARGEST
    codes: tl.tuple = ()
    scales: tl.tuple = ()
    for c in tl.static_range(CHUNKS):
        if X_GROUP is None:
            bound_1R = tl.maximum(tl.full((1, R), 1.0, tl.float32) * largest, TINY_INPUT)
        else:
            bound_1R = tl.maximum(bounds[c], TINY_INPUT)
        inverse = tl.reshape(tl.broadcast_to(tl.div_rn(LARGEST, bound_1R)[:, :, None], (1, R, LANE)), (1, BLOCK_W))
        codes += (to_code(chunks[c] * inverse, KIND, ON_CARD),)
        scales += (tl.div_rn(bound_1R, LARGEST),)
    return codes, scales


@triton.jit
def to_code(scaled, KIND: tl.constexpr, ON_CARD: tl.constexpr):
    """The nearest int8 (from -127) or float8, halves to even. Triton's interpreter would cut a float8."""
    if KIND == "int8":
        scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)  # adding 1.5 * 2 ** 23 units leaves whole units
    elif ON_CARD:
        return scaled.to(tl.float8e4nv)  # the largest, if it is larger
    else:
        return float8_bits(tl.minimum(tl.maximum(scaled, -448.0), 448.0)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def float8_bits(x):
    """The bytes of the float8 (E4M3) nearest to each number, halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    # Three bits of the mantissa remain; exponents begin 120 later.
    normal = (bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)
    normal = (normal >> 20) - (120 << 3)
    # Below 2 ** -6 the unit is 2 ** -9: adding 1.5 * 2 ** 23 units leaves whole ones.
    small = ((tl.abs(x) + 24576.0).to(tl.int32, bitcast=True)) & 15
    return (sign | tl.where(tl.abs(x) < 0.015625, small, normal)).to(tl.uint8)
