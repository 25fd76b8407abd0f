"""`--quantization gguf`: weights stay in the blocks that a .gguf file has them in.

A folder's config.json may name it too, with the types of weights, from which `--load-format dummy` draws blocks:
{"quant_method": "gguf", "types": {pattern of paths: type, …}}, where the first pattern that fits counts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.gguf import BLOCK
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.ops.dequantize import gguf as codec
from quire.ops.packed_linear import forms
from quire.quant._select import patterns
from quire.quant.base import Choice, MethodMaker, Part, RawTensor, Reader, Stored, Use


@dataclass(frozen=True)
class Blocks(Reader):
    form = forms.Blocks
    type_name: str | None = None  # None: whatever the file says

    def stored(self, part: Part) -> Iterable[Stored]:
        if self.type_name is None:
            yield Stored(part.end, part.shape, tuple(BLOCK), is_codes=True)
            return
        elements, num_bytes = BLOCK[self.type_name]
        if part.shape[-1] % elements:
            raise UnsupportedModelError(
                f"{part.path} has {part.shape[-1]} inputs, which blocks of {self.type_name} do not divide"
            )
        yield Stored(part.end, part.shape, (self.type_name,), is_codes=True, bits=8 * num_bytes / elements)

    def read_raw(self, part: Part, tensors: dict[str, RawTensor]) -> forms.Form:
        tensor = tensors[part.end]
        if not codec.has_finite_scales(tensor.type_name, tensor.raw):
            raise BadModelFileError(f"a scale of {part.path} is not a finite number")
        return forms.Blocks(tensor.type_name, tensor.raw, (part.num_rows, part.shape[-1]), codec)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    rules = _rules(settings.get("types") or {})

    def find(path: str, ways: Choice) -> MethodMaker:
        # GPUs have no kernel that looks packed rows up.
        if ways.use is Use.NUMBERS or (ways.is_gpu and ways.is_table):
            return ways.plain
        if not settings:
            return ways.read_by(Blocks())
        reader = next((reader for known, reader in rules if known.match(path)), None)
        return ways.plain if reader is None else ways.read_by(reader)

    return find


def _rules(types: Any) -> list[tuple[Any, Blocks]]:
    is_table = isinstance(types, dict) and all(isinstance(name, str) and name in BLOCK for name in types.values())
    if not is_table:
        raise BadModelFileError(f"quantization_config gives types as something else than names of {', '.join(BLOCK)}")
    return list(zip(patterns(types, "types"), map(Blocks, types.values())))
