"""The instructions by which cards decode packed weights, carried out one by one: there is no card where this runs."""

import random
import re
import struct

import pytest

from quire.ops.packed_linear import decode
from quire.ops.packed_linear.forms import E2M1
from quire.ops.packed_linear.words import bit_of_plane

MASK = 0xFFFFFFFF


def bfloat16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def halves(register: int) -> tuple[float, float]:
    return bfloat16(register & 0xFFFF), bfloat16(register >> 16)


def fma(a: int, b: int, c: int) -> int:
    """Of two bfloat16 in each register; all results here have few bits, so that nothing is rounded."""
    results = [x * y + z for x, y, z in zip(halves(a), halves(b), halves(c))]
    bits = [struct.unpack("<I", struct.pack("<f", result))[0] for result in results]
    assert all(not word & 0xFFFF for word in bits)
    return bits[0] >> 16 | bits[1]


def prmt(a: int, b: int, selector: int) -> int:
    """Four of eight bytes, or where the first bit of the selector is set, their first bit in all places."""
    chosen = (b << 32 | a).to_bytes(8, "little")
    picked = [(chosen[selector >> 4 * i & 7], selector >> 4 * i & 8) for i in range(4)]
    return int.from_bytes(bytes((255 if byte & 128 else 0) if repeats else byte for byte, repeats in picked), "little")


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a & MASK,
    "or.b32": lambda a, b: a | b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & MASK,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b & MASK,
    "prmt.b32": prmt,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else 1 / 0,
    "fma.rn.bf16x2": fma,
}


def run(program: str, words: tuple[int, ...], num_planes: int) -> list[tuple[float, float]]:
    """The two values of each plane."""
    return [halves(register) for register in execute(program, words, num_planes)]


def execute(program: str, words: tuple[int, ...], num_planes: int) -> list[int]:
    """The first registers, when the program has run on words that are in the next ones."""
    registers = {f"${num_planes + i}": word for i, word in enumerate(words)}
    for statement in re.sub(r"\s+", " ", program.strip().strip("{}")).split(";"):
        name, _, operands = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return [registers[f"${plane}"] for plane in range(num_planes)]


def float8(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


def doubled(power: int) -> int:
    """A power of two as two bfloat16 in a register."""
    return (power + 127 << 7) * 0x10001


# By name: the bits of a code, the instructions, scales of neighbouring planes, and a code's value.
PROGRAMS = {
    "affine4": (4, 0, lambda code: 128.0 + code),
    "e2m1 with 4 scales": (4, 4, lambda code: E2M1[code]),
    "e2m1 with 8 scales": (4, 8, lambda code: E2M1[code]),
    "affine8": (8, 0, float),
    "e4m3": (8, 0, float8),
    "affine4 with 1 scale": (4, 1, lambda code: code - 5.0),
    "affine4 with 4 scales": (4, 4, lambda code: code - 5.0),
    "affine8 with 2 scales": (8, 2, lambda code: code - 5.0),
    "affine4 with 4 scales and minimums": (4, 4, lambda code: code + 3.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_code_becomes_its_value(name):
    bits, num_scales, value = PROGRAMS[name]
    kind = name[:4] if name[0] == "e" else "affine"
    has_minimums = "minimum" in name
    pair = ("minimums" if has_minimums else "zeros",) if kind == "affine" and num_scales else ()
    program = decode.PROGRAMS[kind, bits, num_scales, *pair]
    source = random.Random(0)
    seen = set()
    scales = []
    for i in range(num_scales):
        if kind == "e2m1":
            scales += [doubled(126 - i)] * 2
        else:  # less the code of zero, a scale, and a minimum of 8 scales
            zero = struct.unpack("<I", struct.pack("<f", -(133.0 if bits == 4 else 5.0)))[0] >> 16
            scales += [zero * 0x10001] * 2 + [doubled(-i)] * 2 + [doubled(3 - i)] * 2 * has_minimums
    while len(seen) < 2**bits * 2 * 32 // bits:  # every code in both words and every plane
        words = source.getrandbits(32), source.getrandbits(32)
        for plane, found in enumerate(run(program, (*words, *scales), 32 // bits)):
            codes = [word >> bit_of_plane(kind, bits, plane) & 2**bits - 1 for word in words]
            for i, code in enumerate(codes):
                seen.add((plane, i, code))
                if kind == "e4m3" and code & 127 == 127:  # not a number: no checkpoint that is read has it
                    continue
                assert found[i] == value(code) / 2 ** (plane * num_scales // (32 // bits)), (name, plane, code)


def test_every_e2m1_becomes_a_byte():
    source = random.Random(0)
    tables = [
        table.value
        for table in (
            decode.POSITIVE_0_TO_3,
            decode.POSITIVE_4_TO_7,
            decode.NEGATIVE_0_TO_3,
            decode.NEGATIVE_4_TO_7,
        )
    ]
    seen = set()
    while len(seen) < 16 * 8:  # every code in every plane
        word = source.getrandbits(32)
        lower, upper = execute(decode.E2M1_BYTES.value, (word, *tables), 2)
        for plane in range(8):
            code = word >> 4 * plane & 15
            seen.add((plane, code))
            byte = (upper << 32 | lower) >> 8 * plane & 255
            assert (byte - decode.E2M1_ZERO.value) / 2 == E2M1[code], (plane, code)
