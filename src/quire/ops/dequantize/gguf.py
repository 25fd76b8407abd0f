"""GGUF's block formats in torch: what forms they are, and their values, bit for bit as the format's tools give.

Called by the loader, and the oracle of every kernel that computes on packed blocks. Knows bytes and scales, not files
or names of tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.checkpoint.gguf import BLOCK
from quire.ops.packed_linear.forms import E2M1, Affine, Plain, Table4, TwoLevel

# Elements converted at a time. Temporaries stay in a core's cache, and torch runs operations of up to this size on the
# calling thread: waking its pool for each would cost more than the work, many times more on a busy machine.
_CHUNK_ELEMENTS = 1 << 15
_GPU_CHUNK_ELEMENTS = 1 << 26  # fewer launches, of which each takes longer than such a small chunk


def dequantize(
    type_name: str,
    raw: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """`raw`, the bytes of a tensor of `type_name`, as floats of `shape`: computed in float32, then rounded to `dtype`.

    With `out`, a contiguous tensor of `shape`, values are written there, in its dtype, and little else is allocated.
    """
    elements, block_bytes = BLOCK[type_name]
    num_blocks = raw.numel() // block_bytes
    if raw.numel() % block_bytes or num_blocks * elements != math.prod(shape):
        raise ValueError(f"{raw.numel()} bytes are not a {type_name} tensor of shape {tuple(shape)}")
    if out is None:
        out = torch.empty(tuple(shape), dtype=dtype, device=raw.device)
    blocks = raw.reshape(num_blocks, block_bytes)
    values = out.view(num_blocks, elements)
    if blocks.storage_offset() % 4:
        blocks = blocks.clone()  # Tensor.view(float) wants its start aligned
    read = _PLAIN.get(type_name) or _numbers(_FORMS[type_name])
    step = max(1, (_CHUNK_ELEMENTS if raw.device.type == "cpu" else _GPU_CHUNK_ELEMENTS) // elements)
    for start in range(0, num_blocks, step):
        chunk = read(blocks[start : start + step])
        values[start : start + step] = chunk.reshape(-1, elements)
    return out


def read_form(type_name: str, raw: Tensor, shape: tuple[int, int]) -> Affine | Table4 | Plain:
    """The bytes of a matrix as the form that its type is."""
    elements, block_bytes = BLOCK[type_name]
    n, k = shape
    if raw.numel() * elements != n * k * block_bytes or k % elements:
        raise ValueError(f"{raw.numel()} bytes are not a {type_name} tensor of shape {shape}")
    if type_name in _PLAIN:
        return Plain(_PLAIN[type_name](raw.clone() if raw.storage_offset() % 4 else raw).view(n, k))
    form = _FORMS[type_name](raw.reshape(-1, block_bytes))
    codes_NK = form.codes_NK.reshape(n, k)
    scales_NG = _by_row(form.scales_NG, n)
    if isinstance(form, Table4):
        return replace(form, codes_NK=codes_NK, scales_NG=scales_NG)
    mins_NG = None if form.mins_NG is None else _by_row(form.mins_NG, n)
    return replace(form, codes_NK=codes_NK, scales_NG=scales_NG, mins_NG=mins_NG)


def has_finite_scales(type_name: str, raw: Tensor) -> bool:
    blocks = raw.reshape(-1, BLOCK[type_name][1])
    if type_name == "MXFP4":
        return not bool((blocks[:, 0] == 255).any())
    return all(bool(_half(blocks, place).isfinite().all()) for place in HALVES.get(type_name, ()))


def _by_row(scales: Tensor | TwoLevel, n: int) -> Tensor | TwoLevel:
    if isinstance(scales, Tensor):
        return scales.reshape(n, -1)
    return TwoLevel(scales.codes_NG.reshape(n, -1), scales.outer_NS.reshape(n, -1), scales.bits)


def _numbers(read: Callable[[Tensor], Affine | Table4]) -> Callable[[Tensor], Tensor]:
    return lambda blocks: read(blocks).numbers()


# Below, N counts blocks; every reader takes uint8 [N, block bytes] and gives a form of N outputs.


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block: [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """All fields of `bits` bits, lowest first: uint8 [..., K] -> [..., 8 / bits, K]."""
    packed = packed.contiguous()
    mask, top = (1 << bits) - 1, 8 - bits
    fields = [(packed >> shift) & mask for shift in range(0, top, bits)]
    return torch.stack([*fields, packed >> top], dim=-2)


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves."""
    return _fields(packed, 4).flatten(1)


def _q4_0(blocks: Tensor) -> Affine:
    return Affine(_nibbles(blocks[:, 2:]), _half(blocks, 0), 4, zero=8)


def _q4_1(blocks: Tensor) -> Affine:
    return Affine(_nibbles(blocks[:, 4:]), _half(blocks, 0), 4, mins_NG=_half(blocks, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Q5_0 and Q5_1: bit i of the 32 in `high` [N, 4] is the fifth bit of quant i."""
    words = high.clone(memory_format=torch.contiguous_format).view(torch.int32)  # a clone: an aligned start
    fifth = words >> torch.arange(32, dtype=torch.int32, device=high.device)
    return _nibbles(low) | ((fifth & 1) << 4).to(torch.uint8)


def _q5_0(blocks: Tensor) -> Affine:
    return Affine(_five_bits(blocks[:, 2:6], blocks[:, 6:]), _half(blocks, 0), 5, zero=16)


def _q5_1(blocks: Tensor) -> Affine:
    return Affine(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), 5, mins_NG=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Affine:
    return Affine(blocks[:, 2:] ^ 128, _half(blocks, 0), 8, zero=128)


# The K types have 256 elements in 8 or 16 groups with a small scale (and minimum) each, times one float16 per block.
# Quants come in runs of 32 bytes: field 0 of all 32, then field 1 of all 32, and so on.


def _runs(packed: Tensor, bits: int) -> Tensor:
    """uint8 [N, bytes] -> the fields in element order, [N, elements]."""
    return _fields(packed.unflatten(1, (-1, 32)), bits).flatten(1)


def _q2_k(blocks: Tensor) -> Affine:
    scales = TwoLevel(blocks[:, :16] & 15, _half(blocks, 80), 4)
    minimums = TwoLevel(blocks[:, :16] >> 4, -_half(blocks, 82), 4)
    return Affine(_runs(blocks[:, 16:80], 2), scales, 2, mins_NG=minimums)


def _q3_k(blocks: Tensor) -> Affine:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]) | (_fields(packed[:, 8:], 2).flatten(1) << 4)
    codes = _runs(low, 2) | (_runs(high, 1) << 2)
    return Affine(codes, TwoLevel(scales.view(torch.int8) - 32, _half(blocks, 108)), 3, zero=4)


def _scales_and_minimums(blocks: Tensor) -> tuple[TwoLevel, TwoLevel]:
    """Q4_K and Q5_K: two float16 and eight pairs of 6-bit numbers in 12 bytes.

    Groups 0-3 have their six bits in bytes 0-3 (scales) and 4-7 (minimums); groups 4-7 have the low four bits in the
    halves of bytes 8-11 and the high two bits above those of groups 0-3.
    """
    scales, minimums, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([scales & 63, (low & 15) | ((scales >> 6) << 4)], dim=1)
    minimums = torch.cat([minimums & 63, (low >> 4) | ((minimums >> 6) << 4)], dim=1)
    return TwoLevel(scales, _half(blocks, 0)), TwoLevel(minimums, -_half(blocks, 2))


def _q4_k(blocks: Tensor) -> Affine:
    scales, minimums = _scales_and_minimums(blocks)
    return Affine(_runs(blocks[:, 16:], 4), scales, 4, mins_NG=minimums)


def _q5_k(blocks: Tensor) -> Affine:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _runs(blocks[:, 48:], 4) | (_runs(blocks[:, 16:48], 1) << 4)
    return Affine(codes, scales, 5, mins_NG=minimums)


def _q6_k(blocks: Tensor) -> Affine:
    # Low halves come in runs of 64 bytes, unlike all others.
    low = _fields(blocks[:, :128].unflatten(1, (2, 64)), 4).flatten(1)
    codes = low | (_runs(blocks[:, 128:192], 2) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Affine(codes, TwoLevel(scales, _half(blocks, 208)), 6, zero=32)


def _iq4_nl(blocks: Tensor) -> Table4:
    return Table4(_nibbles(blocks[:, 2:]), _half(blocks, 0), IQ4)


def _iq4_xs(blocks: Tensor) -> Table4:
    high = blocks[:, 2:4].contiguous().view(torch.int16).int()
    high = (high >> torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device) & 3).to(torch.uint8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _fields(blocks[:, 8:].unflatten(1, (-1, 16)), 4).flatten(1)
    return Table4(codes, TwoLevel(scales, _half(blocks, 0)), IQ4)


def _mxfp4(blocks: Tensor) -> Table4:
    return Table4(_nibbles(blocks[:, 1:]), blocks[:, :1], tuple(value + 0.0 for value in E2M1))  # -0.0 is 0.0 here


IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)

# Where a block has its float16 numbers: a scale, and beside it a minimum. MXFP4 begins with a power of two instead.
HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.view(torch.float32),
    "F16": lambda blocks: blocks.view(torch.float16),
    "BF16": lambda blocks: blocks.view(torch.bfloat16),
}
_FORMS: dict[str, Callable[[Tensor], Affine | Table4]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
