"""Tensors of checkpoints that hold what cannot be meant: numbers that are not finite, scales that undo a product."""

import torch
from torch import Tensor

from quire.errors import BadModelFileError
from quire.ops.packed_linear.forms import float_scales
from quire.quant._select import CPU_VALUES_AT_ONCE, GPU_VALUES_AT_ONCE
from quire.quant.base import Part


def finite(part: Part, tensors: dict[str, Tensor], end: str) -> Tensor:
    """A part's tensor, by the end of its name; BadModelFileError if one of its numbers is not finite."""
    if not bool(tensors[end].isfinite().all()):
        raise BadModelFileError(f"a value in {part.path}{end} is not a finite number")
    return tensors[end]


def checked_scales(part: Part, tensors: dict[str, Tensor], end: str) -> Tensor:
    """Scales of any type, in float32."""
    if tensors[end].dtype == torch.uint8 and bool((tensors[end] == 255).any()):
        raise BadModelFileError(f"a scale in {part.path}{end} is 255, which is no power of two")
    return finite(part, {end: float_scales(tensors[end])}, end)


def positive_scale(part: Part, tensors: dict[str, Tensor], end: str) -> Tensor:
    """One that numbers are divided by."""
    scale = checked_scales(part, tensors, end)
    if not bool((scale > 0).all()):
        raise BadModelFileError(f"{part.path}{end} is a scale of {scale.flatten()[0].item():g}, which is not above 0")
    return scale


def float8_codes(part: Part, tensors: dict[str, Tensor], end: str) -> Tensor:
    """Some at a time, so that looking at them takes no memory to speak of."""
    codes = tensors[end].view(torch.uint8).flatten()
    at_once = CPU_VALUES_AT_ONCE if codes.device.type == "cpu" else GPU_VALUES_AT_ONCE
    if any(int((some & 0x7F).max()) == 0x7F for some in codes.split(at_once)):
        raise BadModelFileError(f"a value in {part.path}{end} is not a number")
    return tensors[end]
