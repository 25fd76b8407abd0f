"""MXFP4 as plain floats, in torch: 32 numbers of four bits share one power of two.

Called by `quant/mxfp4.py`. Knows bytes, not names. Every value is exact in bfloat16.
"""

import torch
from torch import Tensor

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# What a byte holds: the lower four bits are the earlier number.
_PAIRS = tuple((_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values as bfloat16 [E, rows, columns].

    `blocks` are uint8 [E, rows, columns / 32, 16], `scales` uint8 [E, rows, columns / 32].
    """
    # Both numbers of a byte as one 32-bit word, so that they are looked up together.
    pairs = torch.tensor(_PAIRS, dtype=torch.bfloat16, device=blocks.device).view(torch.int32).flatten()
    out = torch.empty((*scales.shape, 32), dtype=torch.bfloat16, device=blocks.device)
    # One expert at a time: the indices, int32, take four times the memory of the bytes.
    for values, block, scale in zip(out, blocks, scales):
        # 2 ** (scale - 127): the byte is a float's exponent.
        powers = (scale.int() << 23).view(torch.float32).bfloat16()
        torch.mul(pairs[block.int()].view(torch.bfloat16), powers[..., None], out=values)
    return out.flatten(2)
