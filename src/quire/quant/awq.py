"""AWQ: whole numbers of 4 bits in 32-bit words along the outputs, eight of them in an order of their own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.ops.packed_linear.forms import Affine, Form
from quire.quant._checked import finite
from quire.quant._dummy import whole_scale, word
from quire.quant._select import Modules, choice, group_size
from quire.quant.base import Choice, MethodMaker, Part, Reader, Stored, Use
from quire.quant.gptq import HALVES, affine, fields

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of eight outputs in their word


@dataclass(frozen=True)
class Awq(Reader):
    group: int  # inputs; 0: all of them
    form = Affine

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        group = self.group or k
        if n % 8 or k % group:
            raise UnsupportedModelError(f"{part.path} has {n} x {k} weights: AWQ needs eights, and groups of {group}")
        yield Stored(".qweight", (k, n // 8), ("I32",), ("inputs", "outputs"), is_codes=True)
        zeros = word(4, 7, 8)  # not all the same, as in published checkpoints
        yield Stored(".qzeros", (k // group, n // 8), ("I32",), ("inputs", "outputs"), fill=zeros)
        yield Stored(".scales", (k // group, n), HALVES, ("inputs", "outputs"), fill=whole_scale(4))

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes_NK, zeros_NG = (_by_output(tensors[end]) for end in (".qweight", ".qzeros"))
        return affine(codes_NK, finite(part, tensors, ".scales").T, zeros_NG, bits=4)


def _by_output(words: Tensor) -> Tensor:
    places = torch.tensor(PLACES, device=words.device)
    return fields(words, 4)[..., places].permute(1, 2, 0).flatten(0, 1)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    choice(settings, "bits", (4,))
    for key in ("version", "checkpoint_format", "format"):
        choice(settings, key, ("gemm", "GEMM", None))
    choice(settings, "zero_point", (True,), True)
    skipped = Modules(settings.get("modules_to_not_convert"), "modules_to_not_convert")
    reader = Awq(group_size(settings))

    def find(path: str, ways: Choice) -> MethodMaker:
        is_plain = ways.is_table or ways.use is Use.HEAD or path in skipped
        return ways.plain if is_plain else ways.read_by(reader)

    return find
