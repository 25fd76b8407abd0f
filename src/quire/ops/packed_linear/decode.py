"""What the codes of packed weights stand for, in Triton: plane by plane as float32, or all planes as bfloat16.

Used by the kernels of this folder. `triton.py` multiplies float32, a plane at a time (`decode_plane`). `tiles.py` wants
bfloat16 for tensor cores (`decode`): a tile of 16 words becomes as many values per plane. On a card two words are
decoded at once, by instructions that work on both halves of a register: one or two for each value. Elsewhere, for the
interpreter and for tables, each plane is cut out of the words by plain operations.
"""

import triton
import triton.language as tl

# Of each kind, for words $8 and $9 (or $4 and $5, with four planes): plane after plane, two values per register.
_NIBBLES = """
.reg .b32 lo, hi, s;
prmt.b32 lo, $8, $9, 0x5410;
prmt.b32 hi, $8, $9, 0x7632;
"""


def _affine4() -> str:
    """128 + code: the code is put into the last bits of the number 128."""
    lines = []
    for plane in range(8):
        half = "lo" if plane < 4 else "hi"
        lines.append(f"shr.u32 s, {half}, {plane % 4 * 4};")
        lines.append(f"lop3.b32 ${plane}, s, 0x000F000F, 0x43004300, 0xEA;")
    return "{" + _NIBBLES + "\n".join(lines) + "}"


def _e2m1() -> str:
    """Sign, exponent and mantissa go to those of a bfloat16, whose exponent is then too small by 126."""
    lines = []
    for plane in range(8):
        half = "lo" if plane < 4 else "hi"
        lines.append(f"shl.b32 s, {half}, {12 - plane % 4 * 4};")
        lines.append("shr.u32 t, s, 6;")
        lines.append("and.b32 t, t, 0x01C001C0;")
        lines.append("lop3.b32 s, s, 0x80008000, t, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${plane}, s, m, z;")
    constants = ".reg .b32 t, m, z; mov.b32 m, 0x7E807E80; mov.b32 z, 0x80008000;\n"
    return "{" + _NIBBLES + constants + "\n".join(lines) + "}"


def _affine8() -> str:
    """The code: 128 and its last seven bits, less 128 if its first bit is not set."""
    lines = [".reg .b32 s, t, one; mov.b32 one, 0x3F803F80;"]
    for plane in range(4):
        selector = f"0x{plane + 4:X}{plane + 4:X}{plane:X}{plane:X}"
        lines.append(f"prmt.b32 s, $4, $5, {selector};")
        lines.append("not.b32 t, s;")
        lines.append("and.b32 t, t, 0x00800080;")
        lines.append("mul.lo.u32 t, t, 0x86;")  # 0x80 becomes 0x4300, which is 128
        lines.append("lop3.b32 s, s, 0x007F007F, 0x43004300, 0xEA;")
        lines.append("xor.b32 t, t, 0x80008000;")
        lines.append(f"fma.rn.bf16x2 ${plane}, s, one, t;")
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


AFFINE4, E2M1, AFFINE8, E4M3 = (tl.constexpr(make()) for make in (_affine4, _e2m1, _affine8, _e4m3))


@triton.jit
def decode(words, table_ptr, KIND: tl.constexpr, BITS: tl.constexpr, ON_CARD: tl.constexpr):
    """The values of each plane, [N, 16] like the words. Those of four-bit whole numbers are too large by 128."""
    if not ON_CARD or KIND == "table":
        planes: tl.tuple = ()
        for plane in tl.static_range(32 // BITS):
            planes += (_plane(words, table_ptr, plane, KIND, BITS),)
        return planes
    elif BITS == 4:
        return tl.inline_asm_elementwise(
            AFFINE4 if KIND == "affine" else E2M1,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            AFFINE8 if KIND == "affine" else E4M3,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _plane(words, table_ptr, plane: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr):
    code = (words >> (BITS * plane)) & (2**BITS - 1)
    if KIND == "affine":
        values = code.to(tl.float32) + (128 if BITS == 4 else 0)
    elif KIND == "e2m1":
        values = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif KIND == "e4m3":
        values = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
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


INPUT_EXPONENT = tl.constexpr(100)  # inputs times 2 ** 100: largest ones of 2 ** 27 still fit


@triton.constexpr_function
def power(exponent):
    return 2.0**exponent


@triton.jit
def decode_plane(codes, table_ptr, plane: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr):
    """The codes of one plane as float32.

    Of whole numbers in words code * 2 ** (place - 149), where place is that of its lowest bit after the shift; of those
    in bytes 256 + code; of other kinds their values.
    """
    if PLANES == 1:
        if KIND == "e4m3":
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return (((codes.to(tl.int32) ^ 128) << 15) | 0x43800000).to(tl.float32, bitcast=True)  # 256.0 and code
    elif KIND == "affine":
        # Bits 20 and up would reach the exponent: the planes there are shifted to where the first ones are.
        IN_PLACE: tl.constexpr = 20 // BITS
        bits = codes >> (plane // IN_PLACE * IN_PLACE * BITS)
        return (bits & ((2**BITS - 1) << (plane % IN_PLACE * BITS))).to(tl.float32, bitcast=True)
    elif KIND == "e2m1":
        # Exponent and mantissa go to those of a float32, whose exponent is then too small by 126.
        code = codes >> (4 * plane)
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126
    elif KIND == "e4m3":
        code = codes >> (8 * plane)
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    else:
        return tl.load(table_ptr + ((codes >> (4 * plane)) & 15))


# ---- scales and rows ------------------------------------------------------------------------------------------------


@triton.jit
def group_scale(scales_ptr, outer_ptr, place, GROUPS: tl.constexpr):
    """In float32; bytes are exponents, or whole numbers with a scale for so many of them."""
    scale = tl.load(scales_ptr + place)
    if scale.dtype == tl.uint8:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif outer_ptr is not None:
        return scale.to(tl.float32) * tl.load(outer_ptr + place // GROUPS).to(tl.float32)
    else:
        return scale.to(tl.float32)


@triton.jit
def load_row(row_ptrs, w_1W, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Elements of rows of W, BLOCK_W at a time; zeros past their end."""
    if W % BLOCK_W == 0:
        return tl.load(row_ptrs + w_1W)
    else:
        return tl.load(row_ptrs + w_1W, mask=w_1W < W, other=0)
