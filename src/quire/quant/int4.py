"""`--quantization int4`: a plain checkpoint's weights are rounded while loading, a scale and a minimum for each 32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.ops.packed_linear.forms import Affine, Coded
from quire.quant._select import PlainReader, refuse_settings, while_loading
from quire.quant.base import Choice, MethodMaker

GROUP = 32


@dataclass(frozen=True)
class Online(PlainReader):
    group = GROUP
    form = Affine
    bits = 4 + 32 / GROUP

    def round(self, weight_NK: Tensor) -> Coded:
        groups = weight_NK.unflatten(1, (-1, GROUP))
        # Scales and minimums are float16, and codes are chosen for these.
        mins = groups.amin(2).clamp(max=0.0).half()
        scales = ((groups.amax(2) - mins.float()) / 15).clamp(min=2.0**-24).half()
        codes = ((groups - mins.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
        return Affine(codes.flatten(1).to(torch.uint8), scales, 4, 0, mins)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    refuse_settings(settings)
    return while_loading(Online(), head_on_cpus=True)
