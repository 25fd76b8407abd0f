"""MXFP4, of experts: a checkpoint holds four-bit numbers (blocks) and a power of two for each 32 of them (scales). Both become plain numbers
here, when a part has come whole; the rest of such a model is plain."""

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
        scales = *rows, columns // BLOCK_VALUES
        for end, shape, num_values in (
            ("_blocks", (*scales, BLOCK_BYTES), math.prod(part.shape)),
            ("_scales", scales, 0),
        ):
            load, axes = partial(self.load_half, part_idx, arrived, end), (*AXES[len(part.shape)], None)[: len(shape)]
            yield Weight(f"{part.path}{end}", shape, load, part.split, axes, types=("U8",), num_values=num_values)

    def load_half(self, part_idx: int, arrived: dict[str, RawTensor], end: str, tensor: RawTensor) -> None:
        arrived[end] = tensor
        if len(arrived) == 2:
            blocks, scales = (found.raw.view(found.shape) for found in (arrived.pop("_blocks"), arrived.pop("_scales")))
            values = dequantize(blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:]))
            self.put(part_idx, values.to(self.device, self.dtype))


def method(path: str, use: Use, plain: type[Method], settings: dict[str, Any]) -> type[Method]:
    return Mxfp4 if use is Use.NUMBERS and ".experts." in path else plain
