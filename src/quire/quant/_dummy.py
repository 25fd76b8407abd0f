"""What `--load-format dummy` fills scales and zero points with: random codes then are weights of the usual spread.

Used by readers, in what they say of a checkpoint's tensors (`Stored.fill`), and by worker/dummy.py, which draws them.
"""

import math
from statistics import pstdev

import torch
from torch import Tensor

from quire.ops.dequantize.gguf import HALVES
from quire.ops.packed_linear.forms import E2M1

STD = 0.02  # of dummy weights
# Clears the highest bit of the exponent of random float8 codes: none is NaN, and all are below 2.
FLOAT8_MASK = 0b1011_1111
FLOAT8_SCALE = STD / 0.598  # the spread of such codes
E2M1_SCALE = STD / pstdev(E2M1)
E2M1_EXPONENT = 127 + round(math.log2(E2M1_SCALE))  # the byte of the nearest power of two
INPUT_SCALE = 2.0**-4  # of activations, where a checkpoint says it: float8 reaches 28


def whole_scale(bits: int) -> float:
    """For whole numbers of so many bits, around a zero point in the middle."""
    return STD / math.sqrt((4**bits - 1) / 12)


def signed_scales(bits: int, num_outputs: int) -> Tensor:
    """For zero points that are all the same: a code more is below them than above, so every other output is negated.

    Otherwise all numbers had a mean, which a product with many inputs makes the largest part of its outputs.
    """
    return whole_scale(bits) * (1.0 - 2.0 * (torch.arange(num_outputs) % 2))


def word(bits: int, *codes: int) -> int:
    """A 32-bit word, with a sign, that holds these codes in turn."""
    unsigned = sum(codes[place % len(codes)] << place * bits for place in range(32 // bits))
    return unsigned - (unsigned >> 31 << 32)


def group_of_input(num_inputs: int, group: int) -> Tensor:
    """Groups of neighbours."""
    return torch.arange(num_inputs) // group


# How much larger than scales the minimums of a GGUF type must be, for values around zero.
_MINIMUMS = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def set_block_scales(type_name: str, blocks: Tensor, scale: float) -> None:
    """In place, in uint8 [blocks, bytes of a block]."""
    if type_name == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(scale))
        return
    # Codes are not quite around zero: every other block is negated, so that all numbers are.
    for first, sign in enumerate((1.0, -1.0)):
        for place, ratio in zip(HALVES[type_name], (1.0, _MINIMUMS.get(type_name, 0.0))):
            half = torch.tensor([sign * scale * ratio]).half().view(torch.uint8)
            blocks[first::2, place : place + 2] = half.to(blocks.device)
