"""What the codes of packed weights stand for, in Triton: as bytes, as float32 or as bfloat16.

Used by the kernels of this folder. `triton.py` multiplies whole numbers (`byte_planes`), or float32 (`float_planes`).
`tiles.py` wants bfloat16 for tensor cores (`decode`): a tile of 16 words becomes as many values per plane. On a card
two words are decoded at once, by instructions that work on both halves of a register: one or two for each value.
Elsewhere, for the interpreter and for tables, each plane is cut out of the words by plain operations.
"""

import triton
import triton.language as tl

from quire.ops.packed_linear.words import bit_of_plane

# Of each kind, for words $8 and $9 (or $4 and $5, with four planes): plane after plane, two values per register.
_NIBBLES = """
.reg .b32 lo, hi, s;
prmt.b32 lo, $8, $9, 0x5410;
prmt.b32 hi, $8, $9, 0x7632;
"""


plane_bit = triton.constexpr_function(bit_of_plane)

_ONE = ".reg .b32 one, m; mov.b32 one, 0x3F803F80;"
PAIR_REGISTERS = {"zeros": 2, "minimums": 3}


def _scaled(plane: int, num_planes: int, num_scales: int, pair: str) -> list[str]:
    """What follows if weights are scaled: less the code of zero, times a scale, and perhaps a minimum.

    Each is two equal numbers in a register, of which every second one is used. -0.0 adds nothing.
    """
    first = num_planes + 2 + plane * num_scales // num_planes * 2 * PAIR_REGISTERS[pair]
    minimum = f"${first + 4}" if pair == "minimums" else "0x80008000"
    subtract, multiply = f"fma.rn.bf16x2 s, s, one, ${first};", f"fma.rn.bf16x2 ${plane}, s, ${first + 2}, m;"
    return [subtract, f"mov.b32 m, {minimum};", multiply]


def _affine4(num_scales: int, pair: str = "zeros") -> str:
    """128 + code: the code is put into the last bits of the number 128."""
    lines = [_ONE]
    for plane in range(8):
        bit = bit_of_plane("affine", 4, plane)
        lines.append(f"shr.u32 s, {'hi' if bit >= 16 else 'lo'}, {bit % 16};")
        lines.append(f"lop3.b32 {'s' if num_scales else f'${plane}'}, s, 0x000F000F, 0x43004300, 0xEA;")
        lines += _scaled(plane, 8, num_scales, pair) if num_scales else []
    return "{" + _NIBBLES + "\n".join(lines) + "}"


def _e2m1(num_scales: int) -> str:
    """Sign, exponent and mantissa go to those of a bfloat16, whose exponent is then too small by 126.

    Scales of neighbouring planes make up for it: $10, $12, … with two in each register. Without scales, 2 ** 126 does.
    """
    lines = [".reg .b32 t, z, m; mov.b32 z, 0x80008000; mov.b32 m, 0x7E807E80;"]
    for plane in range(8):
        half = "lo" if plane < 4 else "hi"
        lines.append(f"shl.b32 s, {half}, {12 - plane % 4 * 4};")
        lines.append("shr.u32 t, s, 6;")
        lines.append("and.b32 t, t, 0x01C001C0;")
        lines.append("lop3.b32 s, s, 0x80008000, t, 0xEA;")
        scale = f"${10 + plane * num_scales // 8 * 2}" if num_scales else "m"
        lines.append(f"fma.rn.bf16x2 ${plane}, s, {scale}, z;")
    return "{" + _NIBBLES + "\n".join(lines) + "}"


def _affine8(num_scales: int, pair: str = "zeros") -> str:
    """The code: 128 and its last seven bits, less 128 if its first bit is not set."""
    lines = [".reg .b32 s, t;", _ONE]
    for plane in range(4):
        selector = f"0x{plane + 4:X}{plane + 4:X}{plane:X}{plane:X}"
        lines.append(f"prmt.b32 s, $4, $5, {selector};")
        lines.append("not.b32 t, s;")
        lines.append("and.b32 t, t, 0x00800080;")
        lines.append("mul.lo.u32 t, t, 0x86;")  # 0x80 becomes 0x4300, which is 128
        lines.append("lop3.b32 s, s, 0x007F007F, 0x43004300, 0xEA;")
        lines.append("xor.b32 t, t, 0x80008000;")
        lines.append(f"fma.rn.bf16x2 {'s' if num_scales else f'${plane}'}, s, one, t;")
        lines += _scaled(plane, 4, num_scales, pair) if num_scales else []
    return "{" + "\n".join(lines) + "}"


def _e4m3() -> str:
    """Sign, exponent and mantissa go to those of a bfloat16, whose exponent is then too small by 120."""
    lines = [".reg .b32 s, t, m, z; mov.b32 m, 0x7B807B80; mov.b32 z, 0x80008000;"]
    for plane in range(4):
        selector = f"0x{plane + 4:X}{plane + 4:X}{plane:X}{plane:X}"
        lines.append(f"prmt.b32 s, $4, $5, {selector};")
        lines.append("shr.u32 t, s, 4;")
        lines.append("and.b32 t, t, 0x07F007F0;")
        lines.append("lop3.b32 s, s, 0x80008000, t, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${plane}, s, m, z;")
    return "{" + "\n".join(lines) + "}"


@triton.constexpr_function
def power(exponent):
    return 2.0**exponent


GAIN = tl.constexpr(9)  # so that scales of up to 2 ** 9 times 2 ** 126 are bfloat16 (`words.LARGEST_POWER`)
# The instructions of each kind, by how many scales weights are multiplied with, and of pairs by what comes second.
PROGRAMS: dict[tuple[object, ...], str] = {
    ("affine", 4, 0): _affine4(0),
    ("affine", 8, 0): _affine8(0),
    ("e4m3", 8, 0): _e4m3(),
}
PROGRAMS |= {("e2m1", 4, num_scales): _e2m1(num_scales) for num_scales in (0, 4, 8)}
for pair in PAIR_REGISTERS:
    PROGRAMS |= {("affine", 4, num_scales, pair): _affine4(num_scales, pair) for num_scales in (1, 2, 4, 8)}
    PROGRAMS |= {("affine", 8, num_scales, pair): _affine8(num_scales, pair) for num_scales in (1, 2, 4)}


@triton.constexpr_function
def instructions(kind, bits, num_scales, pair):
    if kind == "affine" and num_scales:
        return PROGRAMS[kind, bits, num_scales, pair.split()[1]]
    return PROGRAMS[kind, bits, num_scales]


@triton.constexpr_function
def registers(num_planes, num_inputs):
    """The constraints of an instruction with so many results and inputs, for two elements at a time."""
    return ",".join(["=r"] * num_planes + ["r"] * (2 * num_inputs))


@triton.jit
def decode(
    words,
    table_ptr,
    scales,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    PAIR: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """The values of each plane, [N, 16] like the words.

    With `scales`, values are multiplied by them, and are too small by 2 ** GAIN, so that all scales of E2M1 have a
    place in a bfloat16: words [N], each with four bytes, or pairs; every scale has as many neighbouring planes.
    Otherwise, values of four-bit whole numbers are too large by 128.
    """
    NUM_SCALES: tl.constexpr = len(scales) * (4 if KIND == "e2m1" else 1)
    if not ON_CARD or KIND == "table":
        planes: tl.tuple = ()
        for plane in tl.static_range(32 // BITS):
            values = plane_values(words, table_ptr, plane, KIND, BITS)
            if NUM_SCALES == 0 and KIND == "affine" and BITS == 4:
                values += 128
            elif NUM_SCALES > 0 and KIND == "affine":
                pairs = scales[plane * NUM_SCALES * BITS // 32]
                scale = pair_scale(pairs, PAIR) * power(-GAIN)
                shift = pair_minimum(pairs, pair_scale(pairs, PAIR), PAIR) * power(-GAIN)
                values = values * scale[:, None] + shift[:, None]
            elif NUM_SCALES > 0:
                byte = scales[plane * len(scales) // 8] >> (plane * len(scales) // 2 % 4 * 8)
                values *= (_byte_as_float(byte & 255, BYTES) * power(-GAIN))[:, None]
            planes += (values,)
        return planes
    else:
        given: tl.tuple = (words,)
        for i in tl.static_range(NUM_SCALES):
            if KIND == "affine":
                given += _pair_registers(scales[i], words, BITS, PAIR)
            else:
                byte = (scales[i // 4] >> (i % 4 * 8)) & 255
                if BYTES == "exponents":
                    bits = (byte + (126 - GAIN)) << 7
                else:
                    bits = _bits(_byte_as_float(byte, BYTES) * power(126 - GAIN))
                given += (tl.broadcast_to((bits * 0x10001)[:, None], words.shape),)
        return tl.inline_asm_elementwise(
            instructions(KIND, BITS, NUM_SCALES, PAIR),
            registers(32 // BITS, len(given)),
            given,
            dtype=(tl.bfloat16,) * (32 // BITS),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _pair_registers(pairs, words, BITS: tl.constexpr, PAIR: tl.constexpr):
    """What is added to codes, and multiplied: (less the code of zero, scale); and a minimum."""
    scale = pair_scale(pairs, PAIR)
    if PAIR == "float16 zeros" or PAIR == "bfloat16 zeros":
        zero = ((pairs >> 16) + (128 if BITS == 4 else 0)).to(tl.float32)
        return _twice(-zero, words), _twice(scale * power(-GAIN), words)
    else:
        minimum = pair_minimum(pairs, scale, PAIR)
        zero = scale * 0.0 - (128.0 if BITS == 4 else 0.0)  # not a constant: loops would keep it in another layout
        return _twice(zero, words), _twice(scale * power(-GAIN), words), _twice(minimum * power(-GAIN), words)


@triton.jit
def _twice(numbers, words):
    """The nearest bfloat16 in both halves of registers, for each of a row's words."""
    return tl.broadcast_to((_bits(numbers) * 0x10001)[:, None], words.shape)


@triton.jit
def _bits(numbers):
    """Those of the nearest bfloat16."""
    return numbers.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _byte_as_float(byte, BYTES: tl.constexpr):
    """Of an exponent, or of a float8."""
    if BYTES == "exponents":
        return _power_of_two(byte)
    else:
        return _float8(byte)


@triton.jit
def _power_of_two(exponent):
    """2 ** (exponent - 127)"""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _float8(byte):
    return (((byte & 127) << 20) | ((byte & 128) << 24)).to(tl.float32, bitcast=True) * power(120)


@triton.jit
def plane_values(words, table_ptr, plane: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr):
    """The values of one plane in float32, by plain operations."""
    code = (words >> plane_bit(KIND, BITS, plane)) & (2**BITS - 1)
    if KIND == "affine":
        values = code.to(tl.float32)
    elif KIND == "int8":
        values = (code ^ 128).to(tl.float32)
    elif KIND == "e2m1":
        values = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * power(126)
    elif KIND == "e4m3":
        values = _float8(code)
    else:
        values = tl.load(table_ptr + code)
    return values


@triton.jit
def joined(planes, first: tl.constexpr, NUM: tl.constexpr):
    """Neighbouring planes as one tile [N, 16 * NUM]; nothing moves between threads."""
    N: tl.constexpr = planes[0].shape[0]
    if NUM == 1:
        return planes[first]
    elif NUM == 2:
        pairs = tl.join(planes[first], planes[first + 1])
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), (N, 32))
    elif NUM == 4:
        even = tl.join(planes[first], planes[first + 2])
        odd = tl.join(planes[first + 1], planes[first + 3])
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (N, 64))
    else:
        tl.static_assert(NUM == 8)
        even = tl.join(tl.join(planes[0], planes[4]), tl.join(planes[2], planes[6]))
        odd = tl.join(tl.join(planes[1], planes[5]), tl.join(planes[3], planes[7]))
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (N, 128))


# ---- a plane as float32 ---------------------------------------------------------------------------------------------


# Four float8 of a word, as float32.
FLOAT8_PLANES = tl.constexpr("""{
.reg .b16 lo, hi, a, b, c, d;
.reg .b32 s, t;
mov.b32 {lo, hi}, $4;
cvt.rn.f16x2.e4m3x2 s, lo;
cvt.rn.f16x2.e4m3x2 t, hi;
mov.b32 {a, b}, s;
mov.b32 {c, d}, t;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}""")


@triton.jit
def float_planes(words, table_ptr, KIND: tl.constexpr, BITS: tl.constexpr, ON_CARD: tl.constexpr):
    """The values of all planes as float32."""
    planes: tl.tuple = ()
    if KIND == "e4m3" and ON_CARD:
        planes = tl.inline_asm_elementwise(
            FLOAT8_PLANES, "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    else:
        for plane in tl.static_range(32 // BITS):
            planes += (plane_values(words, table_ptr, plane, KIND, BITS),)
    return planes


# ---- planes as bytes -------------------------------------------------------------------------------------------------


E2M1_ZERO = tl.constexpr(12)  # the byte of E2M1's zero: bytes are whole numbers, of halves

# The bytes of positive codes without their sign, four in a word, and of negative ones.
POSITIVE_0_TO_3, POSITIVE_4_TO_7 = tl.constexpr(0x0F0E0D0C), tl.constexpr(0x18141210)
NEGATIVE_0_TO_3, NEGATIVE_4_TO_7 = tl.constexpr(0x090A0B0C), tl.constexpr(0x00040608)
# Eight codes of E2M1 as bytes. An instruction looks up four codes in a table of eight bytes, and gives zero where the
# first bit, the sign, is set: so that positive and negative codes have a table each.
E2M1_BYTES = tl.constexpr("""{
.reg .b32 flipped, a, b;
xor.b32 flipped, $2, 0x88888888;
prmt.b32 a, $3, $4, $2;
prmt.b32 b, $5, $6, flipped;
or.b32 $0, a, b;
shr.u32 a, $2, 16;
shr.u32 flipped, flipped, 16;
prmt.b32 a, $3, $4, a;
prmt.b32 b, $5, $6, flipped;
or.b32 $1, a, b;
}""")


@triton.jit
def byte_planes(words, zero, KIND: tl.constexpr, BITS: tl.constexpr, ON_CARD: tl.constexpr):
    """Four planes at a time, a byte each, without a sign: codes of whole numbers, or E2M1 (`E2M1_ZERO`).

    `zero` is what the compiler does not know to be 0, so that it keeps tables in registers.
    """
    if KIND == "int8":
        return (words ^ -0x7F7F7F80,)
    elif BITS == 8:
        return (words,)
    elif KIND == "affine":
        return words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    elif ON_CARD:
        return tl.inline_asm_elementwise(
            E2M1_BYTES,
            "=r,=r,r,r,r,r,r",
            [
                words,
                POSITIVE_0_TO_3 + zero,
                POSITIVE_4_TO_7 + zero,
                NEGATIVE_0_TO_3 + zero,
                NEGATIVE_4_TO_7 + zero,
            ],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return _e2m1_bytes(words, 0), _e2m1_bytes(words, 16)


@triton.jit
def _e2m1_bytes(words, FIRST: tl.constexpr):
    """Of four codes, from this bit on, by plain operations."""
    bytes = tl.zeros_like(words)
    for i in tl.static_range(4):
        code = words >> (FIRST + 4 * i)
        exponent = (code >> 1) & 3
        halves = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
        bytes |= (E2M1_ZERO + tl.where((code & 8) == 0, halves, -halves)) << (8 * i)
    return bytes


@triton.jit
def add_products(total, pairs, bytes, UPPER: tl.constexpr, ON_CARD: tl.constexpr):
    """total and the products of two whole numbers, halves of a word with signs, with the lower or upper two bytes."""
    if not ON_CARD:
        lower = bytes >> (16 if UPPER else 0)
        return total + ((pairs << 16) >> 16) * (lower & 255) + (pairs >> 16) * ((lower >> 8) & 255)
    elif UPPER:
        return tl.inline_asm_elementwise(
            "dp2a.hi.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [pairs, bytes, total], tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp2a.lo.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [pairs, bytes, total], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def add_byte_products(total, words, others, ON_CARD: tl.constexpr):
    """total and the four products of the bytes of two words, whole numbers with signs."""
    if ON_CARD:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, others, total], tl.int32, is_pure=True, pack=1
        )
    for byte in tl.static_range(4):
        total += signed_byte(words, byte) * signed_byte(others, byte)
    return total


# ---- scales and rows ------------------------------------------------------------------------------------------------


@triton.jit
def group_scale(scales_ptr, outer_ptr, place, GROUPS: tl.constexpr):
    """In float32; bytes are exponents, or whole numbers with a scale for so many of them."""
    scale = _as_float(tl.load(scales_ptr + place))
    if outer_ptr is not None:
        scale *= tl.load(outer_ptr + place // GROUPS).to(tl.float32)
    return scale


@triton.jit
def load_scales(
    scales_ptr,
    scales_outer_ptr,
    mins_ptr,
    mins_outer_ptr,
    place,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    IN_WORDS: tl.constexpr = False,
):
    """What there is of scales and minimums, as it is stored: loads that nothing waits for yet.

    `IN_WORDS`: four bytes at once, of neighbouring groups; the first is at `place`.
    """
    loaded: tl.tuple = ()
    if scales_ptr is not None:
        loaded += (_load_codes(scales_ptr, place, IN_WORDS),)
    if scales_outer_ptr is not None:
        loaded += (tl.load(scales_outer_ptr + place // SCALES_GROUPS),)
    if mins_ptr is not None:
        loaded += (_load_codes(mins_ptr, place, IN_WORDS),)
    if mins_outer_ptr is not None:
        loaded += (tl.load(mins_outer_ptr + place // MINS_GROUPS),)
    return loaded


@triton.jit
def _load_codes(codes_ptr, place, IN_WORDS: tl.constexpr):
    if IN_WORDS:
        return tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + place // 4)
    else:
        return tl.load(codes_ptr + place)


@triton.jit
def loaded_scale(loaded, first: tl.constexpr, OUTER: tl.constexpr, PAIR: tl.constexpr, BYTE: tl.constexpr = None):
    """A scale, or a minimum, in float32, from what `load_scales` has loaded; `OUTER`: an outer one comes next.

    `PAIR`: the scale of a pair. `BYTE`: which byte of a word; without an outer scale, bytes are exponents.
    """
    if PAIR is not None:
        scale = pair_scale(loaded[first], PAIR)
    elif BYTE is None:
        scale = _as_float(loaded[first])
    elif OUTER:
        scale = signed_byte(loaded[first], BYTE).to(tl.float32)
    else:
        scale = _power_of_two((loaded[first] >> (8 * BYTE)) & 255)
    if OUTER:
        scale *= loaded[first + 1].to(tl.float32)
    return scale


@triton.jit
def signed_byte(words, byte: tl.constexpr):
    return (words << (24 - 8 * byte)) >> 24


@triton.jit
def pair_scale(words, PAIR: tl.constexpr):
    if PAIR == "float16 zeros" or PAIR == "float16 minimums":
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def pair_minimum(words, scale, PAIR: tl.constexpr):
    if PAIR == "float16 minimums":
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PAIR == "bfloat16 minimums":
        return (words & -0x10000).to(tl.float32, bitcast=True)
    else:
        return -scale * (words >> 16).to(tl.float32)


@triton.jit
def _as_float(scale):
    if scale.dtype == tl.uint8:
        return _power_of_two(scale.to(tl.int32))
    else:
        return scale.to(tl.float32)


@triton.jit
def load_row(row_ptrs, w_1W, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Elements of rows of W, BLOCK_W at a time; zeros past their end."""
    if W % BLOCK_W == 0:
        return tl.load(row_ptrs + w_1W)
    else:
        return tl.load(row_ptrs + w_1W, mask=w_1W < W, other=0)


@triton.jit
def fetch_rows(row_ptrs_N, num_words, LINES: tl.constexpr):
    """Asks for the first lines (each 128 bytes) of rows of so many words.

    They come into the second-level cache while the program waits its turn.
    """
    line_1L = tl.minimum(tl.arange(0, LINES), (num_words - 1) // 32)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_ptrs_N[:, None] + line_1L * 32).to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
