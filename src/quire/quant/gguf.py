"""`--quantization gguf`: weights stay in the blocks that a .gguf file has them in."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.gguf import BLOCK
from quire.ops.dequantize import gguf as codec
from quire.ops.packed_linear import forms
from quire.quant.base import Choice, MethodMaker, Part, RawTensor, Reader, Stored, Use


@dataclass(frozen=True)
class Blocks(Reader):
    form = forms.Blocks

    def stored(self, part: Part) -> Iterable[Stored]:
        yield Stored(part.end, part.shape, tuple(BLOCK), is_codes=True)

    def read_raw(self, part: Part, tensors: dict[str, RawTensor]) -> forms.Form:
        tensor = tensors[part.end]
        return forms.Blocks(tensor.type_name, tensor.raw, (part.num_rows, part.shape[-1]), codec)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    def find(path: str, ways: Choice) -> MethodMaker:
        # GPUs have no kernel that looks packed rows up.
        is_plain = ways.use is Use.NUMBERS or (ways.is_gpu and ways.is_table)
        return ways.plain if is_plain else ways.read_by(Blocks())

    return find
