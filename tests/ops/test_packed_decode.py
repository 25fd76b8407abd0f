"""The instructions by which cards decode packed weights, carried out one by one: there is no card where this runs."""

import random
import re
import struct

import pytest

from quire.ops.packed_linear import decode
from quire.ops.packed_linear.forms import E2M1

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
    chosen = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(chosen[selector >> 4 * i & 7] for i in range(4)), "little")


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a & MASK,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & MASK,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b & MASK,
    "prmt.b32": prmt,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else 1 / 0,
    "fma.rn.bf16x2": fma,
}


def run(program: str, words: tuple[int, int], num_planes: int) -> list[tuple[float, float]]:
    """The two values of each plane."""
    registers = {f"${num_planes + i}": word for i, word in enumerate(words)}
    for statement in re.sub(r"\s+", " ", program.strip().strip("{}")).split(";"):
        name, _, operands = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return [halves(registers[f"${plane}"]) for plane in range(num_planes)]


def float8(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


PROGRAMS = {
    "AFFINE4": (4, lambda code: 128.0 + code),
    "E2M1": (4, lambda code: E2M1[code]),
    "AFFINE8": (8, float),
    "E4M3": (8, float8),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_code_becomes_its_value(name):
    bits, value = PROGRAMS[name]
    source = random.Random(0)
    seen = set()
    while len(seen) < 2**bits * 2 * 32 // bits:  # every code in both words and every plane
        words = source.getrandbits(32), source.getrandbits(32)
        for plane, found in enumerate(run(getattr(decode, name).value, words, 32 // bits)):
            codes = [word >> bits * plane & 2**bits - 1 for word in words]
            for i, code in enumerate(codes):
                seen.add((plane, i, code))
                if name == "E4M3" and code & 127 == 127:  # not a number: no checkpoint that is read has it
                    continue
                assert found[i] == value(code), (name, plane, code)
