"""Numbers rounded to 8 bits inside a kernel, in Triton; twin: `reference.py`.

Used by `ops/packed_linear`, by norms (`ops/elementwise`), whose outputs are a layer's inputs, and where keys and values
are written to the cache. Knows tensors only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.rounding.reference import FLOAT8, GROUP_INPUTS, TINY

ROWS_PAST_END = 128

TINY_INPUT = tl.constexpr(TINY)
WHOLE_UNITS = tl.constexpr(1.5 * 2**23)  # added to a float32, leaves whole units


def empty_codes(num_rows: int, width: int, rounds: str, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """(memory for codes, for their scales [M, groups], inputs of a group rounded up to a power of two).

    Scales of neighbouring rows are side by side; behind the last one is room to read on to the end of a tile.
    """
    codes = torch.empty(num_rows, width, dtype=torch.int8 if rounds == "int8 token" else FLOAT8, device=device)
    group = GROUP_INPUTS if rounds == "float8 group" else triton.next_power_of_2(width)
    num_groups = triton.cdiv(width, group)
    memory = torch.empty(num_rows * num_groups + ROWS_PAST_END, dtype=torch.float32, device=device)
    return codes, memory[: num_rows * num_groups].view(num_groups, num_rows).T, group


@triton.constexpr_function
def largest_code(kind):
    return 127.0 if kind == "int8" else 448.0


@triton.constexpr_function
def code_of_largest(kind):
    return 127.0 if kind == "int8" else 256.0


@triton.jit
def round_groups(x_N, input_scale, GROUP: tl.constexpr, IS_INT8: tl.constexpr, ON_CARD: tl.constexpr):
    """(codes of a row or a part of it, as bytes; the scales of its groups)."""
    KIND: tl.constexpr = "int8" if IS_INT8 else "e4m3"
    N: tl.constexpr = x_N.shape[0]
    x = tl.reshape(x_N, (N // GROUP, GROUP))
    inverse, scales = scale_of(tl.max(tl.abs(x), 1), input_scale, KIND)
    codes = stored_code(to_code(x * inverse[:, None], KIND, ON_CARD), KIND)
    return tl.reshape(codes, (N,)), scales


@triton.jit
def scale_of(largest, fixed_scale, KIND: tl.constexpr):
    """(what numbers are multiplied by to get codes, what codes are multiplied by), where `largest` shares a scale."""
    CODE: tl.constexpr = code_of_largest(KIND)
    if fixed_scale is None:
        largest = tl.maximum(largest, TINY_INPUT)
    else:
        largest = tl.zeros_like(largest) + fixed_scale * CODE
    return tl.div_rn(CODE, largest), tl.div_rn(largest, CODE)


@triton.jit
def round_parts(parts, fixed_scale, DTYPE: tl.constexpr, KIND: tl.constexpr, ON_CARD: tl.constexpr):
    """(codes, the numbers they stand for, scales [C, 1]) of vectors that are cut in parts, each [C, …].

    The numbers are rounded to DTYPE first.
    """
    NUM_PARTS: tl.constexpr = len(parts)
    largest_C1 = tl.zeros((parts[0].shape[0], 1), tl.float32)
    wide: tl.tuple = ()
    for i in tl.static_range(NUM_PARTS):
        wide += (parts[i].to(DTYPE).to(tl.float32),)
        largest_C1 = tl.maximum(largest_C1, tl.max(tl.abs(wide[i]), 1, keep_dims=True))
    inverse_C1, scale_C1 = scale_of(largest_C1, fixed_scale, KIND)
    codes: tl.tuple = ()
    numbers: tl.tuple = ()
    for i in tl.static_range(NUM_PARTS):
        number = nearest(wide[i] * inverse_C1, KIND)
        codes += (stored_code(to_code(number, KIND, ON_CARD), KIND),)
        numbers += (number * scale_C1,)
    return codes, numbers, scale_C1


@triton.jit
def stored_code(codes, KIND: tl.constexpr):
    """Float8 codes as bytes."""
    return codes if KIND == "int8" else codes.to(tl.uint8, bitcast=True)


@triton.jit
def nearest(scaled, KIND: tl.constexpr):
    """The number nearest to each that a code stands for, halves to even, as float32.

    Not by way of the code: the compiler has been seen to lose bytes of float8 that are both stored and converted.
    """
    LARGEST: tl.constexpr = largest_code(KIND)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if KIND == "int8":
        return (scaled + WHOLE_UNITS) - WHOLE_UNITS
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of the mantissa remain
        small = (scaled + 24576.0) - 24576.0  # below 2 ** -6 the unit is 2 ** -9
        return tl.where(tl.abs(scaled) < 0.015625, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def to_code(scaled, KIND: tl.constexpr, ON_CARD: tl.constexpr):
    """The nearest int8 (from -127) or float8, halves to even. Triton's interpreter would cut a float8."""
    if KIND == "int8":
        return nearest(scaled, KIND).to(tl.int8)
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
