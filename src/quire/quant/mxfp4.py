"""MXFP4, for the weights of experts: four-bit numbers (blocks) and a power of two for each 32 of them (scales).

They are converted to plain numbers as soon as both tensors of a part are loaded. Other weights of such a model are
plain.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from quire.ops.dequantize.mxfp4 import dequantize
from quire.quant.base import AXES, Method, Part, RawTensor, Use, Weight
from quire.quant.plain.dense import Dense

BLOCK_VALUES, BLOCK_BYTES = 32, 16


class Mxfp4(Dense):
    def declare(self, part_idx: int, part: Part) -> Iterator[Weight]:
        arrived: dict[str, RawTensor] = {}
        *rows, columns = part.shape
        scales_shape = *rows, columns // BLOCK_VALUES
        blocks_shape = *scales_shape, BLOCK_BYTES
        num_values = math.prod(part.shape)
        for end, shape, count in (("_blocks", blocks_shape, num_values), ("_scales", scales_shape, 0)):
            load = partial(self.load_half, part_idx, arrived, end)
            axes = (*AXES[len(part.shape)], None)[: len(shape)]
            yield Weight(f"{part.path}{end}", shape, load, part.split, axes, types=("U8",), num_values=count)

    def load_half(self, part_idx: int, arrived: dict[str, RawTensor], end: str, tensor: RawTensor) -> None:
        """Loads the blocks or the scales of a part; the second of them completes it."""
        arrived[end] = tensor
        if len(arrived) == 2:
            halves = arrived.pop("_blocks"), arrived.pop("_scales")
            blocks, scales = (half.raw.view(half.shape) for half in halves)
            values = dequantize(blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:]))
            self.put(part_idx, values.to(self.device, self.dtype))


def method(path: str, use: Use, plain: type[Method], settings: dict[str, Any]) -> type[Method]:
    return Mxfp4 if use is Use.NUMBERS and ".experts." in path else plain
