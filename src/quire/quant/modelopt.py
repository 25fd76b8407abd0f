"""NVIDIA's modelopt: FP8 with a scale per tensor, and NVFP4."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.ops.packed_linear.forms import Form, Table4
from quire.quant._checked import checked_scales
from quire.quant._dummy import E2M1_SCALE
from quire.quant._select import Globs, check, refuse
from quire.quant.base import INPUTS_STAY, Choice, MethodMaker, Part, Reader, Stored, say_once
from quire.quant.fp8 import SCALES, Scaled
from quire.quant.mxfp4 import nibbles


@dataclass(frozen=True)
class Nvfp4(Reader):
    """Four-bit floats with a float8 scale for each 16, and one scale of the whole that multiplies these."""

    form = Table4

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        if k % 16:
            raise UnsupportedModelError(f"{part.path} has {k} inputs, which groups of 16 do not divide")
        yield Stored(".weight", (n, k // 2), ("U8",), is_codes=True)
        yield Stored(".weight_scale", (n, k // 16), ("F8_E4M3",), fill=1.0)
        yield Stored(".weight_scale_2", (), SCALES, fill=E2M1_SCALE)
        yield Stored(".input_scale", (), SCALES, unused=True)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        factor = checked_scales(part, tensors, ".weight_scale_2")
        checked_scales(part, tensors, ".weight_scale")
        scales_NG = tensors[".weight_scale"]
        return Table4(nibbles(tensors[".weight"]), scales_NG, outer_N=factor.repeat(len(scales_NG)))


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    """`settings`: of config.json, or `quantization` of hf_quant_config.json."""
    algorithm = settings.get("quant_algo")
    readers: dict[Any, Reader] = {"FP8": Scaled(".weight_scale", "tensor", ".input_scale"), "NVFP4": Nvfp4()}
    if not isinstance(algorithm, str) or algorithm not in readers:
        raise UnsupportedModelError(f"quant_algo {algorithm!r:.60} is not supported: {', '.join(readers)} are")
    refuse(settings, "pre_quant_scale", "has_zero_point")
    if algorithm == "NVFP4":
        check(settings, {"group_size": (16,)})
        say_once(INPUTS_STAY)
    excluded = [Globs(settings.get(key), key) for key in ("ignore", "exclude_modules")]

    def find(path: str, ways: Choice) -> MethodMaker:
        is_plain = ways.is_table or any(path in listed for listed in excluded)
        return ways.plain if is_plain else ways.read_by(readers[algorithm])

    return find
