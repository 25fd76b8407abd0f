"""GGUF's block formats as plain floats, in torch: the values of stored blocks, bit for bit as the format's tools give.

Called by the loader, and the oracle of every kernel that computes on packed blocks. Knows bytes and scales, not files
or names of tensors.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.checkpoint.gguf import BLOCK

# Elements converted at a time. Temporaries stay in a core's cache, and torch runs operations of up to this size on the
# calling thread: waking its pool for each would cost more than the work, many times more on a busy machine.
_CHUNK_ELEMENTS = 1 << 15


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
    read = _READERS[type_name]
    step = max(1, _CHUNK_ELEMENTS // elements)
    for start in range(0, num_blocks, step):
        chunk = read(blocks[start : start + step])
        values[start : start + step] = chunk.reshape(-1, elements)
    return out


# Below, N counts blocks; every reader takes uint8 [N, block bytes]. Products and sums are kept apart (no fused
# multiply-add): each rounds once, as in the format's definition.


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, bits: int) -> Tensor:
    """All fields of `bits` bits, lowest first: uint8 [..., K] -> [..., 8 / bits, K]."""
    packed = packed.contiguous()
    mask, top = (1 << bits) - 1, 8 - bits
    fields = [(packed >> shift) & mask for shift in range(0, top, bits)]
    return torch.stack([*fields, packed >> top], dim=-2)


def _q4_0(blocks: Tensor) -> Tensor:
    quants = _fields(blocks[:, 2:], 4).view(torch.int8).flatten(1) - 8
    return quants * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    quants = _fields(blocks[:, 4:], 4).flatten(1)
    return (quants * _half(blocks, 0)).add_(_half(blocks, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Q5_0 and Q5_1: bit i of the 32 in `high` [N, 4] is the fifth bit of quant i."""
    words = high.clone(memory_format=torch.contiguous_format).view(torch.int32)  # a clone: an aligned start
    fifth = words >> torch.arange(32, dtype=torch.int32, device=high.device)
    return _fields(low, 4).flatten(1) | ((fifth & 1) << 4).to(torch.uint8)


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(torch.int8) - 16
    return quants * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return (quants * _half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks, 0)


# The K types have 256 elements in 8 or 16 groups with a small scale (and minimum) each, times one float16 per block.
# Quants come in runs of 32 bytes: field 0 of all 32, then field 1 of all 32, and so on.


def _runs(packed: Tensor, bits: int, group: int) -> Tensor:
    """uint8 [N, bytes] -> the fields in element order, [N, elements / group, group]."""
    return _fields(packed.unflatten(1, (-1, 32)), bits).reshape(len(packed), -1, group)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    quants = _runs(blocks[:, 16:80], 2, group=16)
    scale = (scales & 15) * _half(blocks, 80)
    minimum = (scales >> 4) * _half(blocks, 82)
    return (quants * scale.unsqueeze(2)).sub_(minimum.unsqueeze(2))


def _q3_k(blocks: Tensor) -> Tensor:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = _fields(packed[:, :8], 4).flatten(1) | (_fields(packed[:, 8:], 2).flatten(1) << 4)
    scale = (scales.view(torch.int8) - 32) * _half(blocks, 108)
    quants = _runs(low, 2, group=16) | (_runs(high, 1, group=16) << 2)
    return (quants.view(torch.int8) - 4) * scale.unsqueeze(2)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K and Q5_K: float32 [N, 8, 1] each, from two float16 and eight pairs of 6-bit numbers in 12 bytes.

    Groups 0-3 have their six bits in bytes 0-3 (scales) and 4-7 (minimums); groups 4-7 have the low four bits in the
    halves of bytes 8-11 and the high two bits above those of groups 0-3.
    """
    scales, minimums, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([scales & 63, (low & 15) | ((scales >> 6) << 4)], dim=1)
    minimums = torch.cat([minimums & 63, (low >> 4) | ((minimums >> 6) << 4)], dim=1)
    return (scales * _half(blocks, 0)).unsqueeze(2), (minimums * _half(blocks, 2)).unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minimums(blocks)
    return (_runs(blocks[:, 16:], 4, group=32) * scale).sub_(minimum)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minimums(blocks)
    quants = _runs(blocks[:, 48:], 4, group=32) | (_runs(blocks[:, 16:48], 1, group=32) << 4)
    return (quants * scale).sub_(minimum)


def _q6_k(blocks: Tensor) -> Tensor:
    # Low halves come in runs of 64 bytes, unlike all others.
    low = _fields(blocks[:, :128].unflatten(1, (2, 64)), 4).reshape(-1, 16, 16)
    quants = low | (_runs(blocks[:, 128:192], 2, group=16) << 4)
    scale = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    return (quants.view(torch.int8) - 32) * scale.unsqueeze(2)


_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.view(torch.float32),
    "F16": lambda blocks: blocks.view(torch.float16),
    "BF16": lambda blocks: blocks.view(torch.bfloat16),
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
}
