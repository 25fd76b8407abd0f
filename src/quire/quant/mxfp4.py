"""MXFP4: four-bit floats with a power of two for each 32, as gpt-oss has the weights of its experts.

With `--quantization mxfp4`, weights of a plain checkpoint are rounded to it while loading.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.ops.packed_linear.forms import E2M1, Coded, Form, Table4
from quire.quant._checked import checked_scales
from quire.quant._dummy import E2M1_EXPONENT
from quire.quant._select import Modules, PlainReader, check, while_loading
from quire.quant.base import AXES, Choice, MethodMaker, Part, Reader, Stored, Use

GROUP = 32


@dataclass(frozen=True)
class Blocks(Reader):
    """The weights of all experts in two tensors: 16 bytes for each 32 numbers, and their scales."""

    form = Table4

    def stored(self, part: Part) -> Iterable[Stored]:
        *rows, columns = part.shape
        axes = AXES[len(part.shape)]
        yield Stored("_blocks", (*rows, columns // GROUP, GROUP // 2), ("U8",), (*axes, None), is_codes=True)
        yield Stored("_scales", (*rows, columns // GROUP), ("U8",), axes, fill=E2M1_EXPONENT)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        checked_scales(part, tensors, "_scales")
        codes = nibbles(tensors["_blocks"].view(-1, part.shape[-1] // 2))
        return Table4(codes, tensors["_scales"].view(len(codes), -1))


@dataclass(frozen=True)
class Online(PlainReader):
    """Plain numbers, rounded as they are loaded: to the power of two at which the largest of 32 just fits."""

    group = GROUP
    form = Table4
    bits = 4 + 8 / GROUP

    def round(self, weight_NK: Tensor) -> Coded:
        groups = weight_NK.unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(2).clamp(min=2.0**-100)
        exponents = torch.ceil(torch.log2(largest / 6.0)).clamp(-127, 127)
        codes = nearest(groups * torch.exp2(-exponents)[..., None]).flatten(1)
        return Table4(codes, (exponents + 127).to(torch.uint8))


def nearest(values: Tensor) -> Tensor:
    """The code of the four-bit float nearest to each value."""
    magnitudes = torch.tensor(E2M1[:8], device=values.device)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    return torch.bucketize(values.abs(), between).to(torch.uint8) | (values < 0).to(torch.uint8) << 3


def nibbles(packed: Tensor) -> Tensor:
    """Two codes of each byte, the low bits first: uint8 [rows, bytes] -> [rows, 2 * bytes]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    if not settings:
        return while_loading(Online())
    check(settings, {"bits": (4,), "group_size": (GROUP,)})
    skipped = Modules(settings.get("modules_to_not_convert"), "modules_to_not_convert")

    def find(path: str, ways: Choice) -> MethodMaker:
        is_plain = ways.use is not Use.EXPERTS or path in skipped
        return ways.plain if is_plain else ways.read_by(Blocks())

    return find
