"""`--quantization int8`: a plain checkpoint's weights are rounded while loading, a scale per output and per token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.ops.packed_linear.forms import Affine, Coded
from quire.quant._select import PlainReader, refuse_settings, while_loading
from quire.quant.base import Choice, MethodMaker


@dataclass(frozen=True)
class Online(PlainReader):
    form = Affine
    bits = 8

    def round(self, weight_NK: Tensor) -> Coded:
        scales = weight_NK.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        codes = (weight_NK / scales).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
        return Affine(codes, scales, 8, zero=128, rounds="int8 token")


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    refuse_settings(settings)
    return while_loading(Online(), head_on_cpus=True)
