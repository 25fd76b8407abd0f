"""FP8: eight-bit floats as DeepSeek and Qwen publish them (a scale per 128 x 128 weights), or with a scale per tensor.

With `--quantization fp8`, weights of a plain checkpoint are rounded while loading: a scale per output, activations with
a scale per token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import BadModelFileError
from quire.ops.packed_linear.forms import Coded, Float8, Form
from quire.ops.rounding.reference import FLOAT8, MAX_FLOAT8
from quire.quant._checked import checked_scales, float8_codes, positive_scale
from quire.quant._dummy import FLOAT8_SCALE, INPUT_SCALE
from quire.quant._select import Modules, PlainReader, choice, while_loading
from quire.quant.base import Choice, MethodMaker, Part, Reader, Stored, Use

SCALES = ("F32", "F16", "BF16", "F8_E8M0")
# While loading: scales of an output to choose from, and outputs that are rounded at once.
NUM_SCALES = 8
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Blocks(Reader):
    """A scale per block of outputs and inputs."""

    block: tuple[int, int]
    scale_end: str = ".weight_scale_inv"
    rounds: bool = True  # whether activations are rounded
    form = Float8

    def stored(self, part: Part) -> Iterable[Stored]:
        (*_, n, k), (rows, columns) = part.shape, self.block
        yield Stored(".weight", part.shape, ("F8_E4M3",), is_codes=True)
        yield Stored(self.scale_end, (-(-n // rows), -(-k // columns)), SCALES, fill=FLOAT8_SCALE)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes = float8_codes(part, tensors, ".weight")
        scales = checked_scales(part, tensors, self.scale_end)
        return Float8(codes, scales, self.block, rounds="float8 group" if self.rounds else None)


@dataclass(frozen=True)
class Scaled(Reader):
    """A scale per tensor or per output; activations with a scale per token, or with the checkpoint's own."""

    scale_end: str
    scale_shapes: str  # "tensor" ([]), "one" ([1]) or "outputs" ([N, 1])
    input_scale_end: str | None = None  # where activations have the checkpoint's scale
    rounds: bool = True  # whether activations are rounded
    form = Float8

    def stored(self, part: Part) -> Iterable[Stored]:
        shape = {"tensor": (), "one": (1,), "outputs": (part.shape[0], 1)}[self.scale_shapes]
        axes = {"tensor": (), "one": (None,), "outputs": ("outputs", None)}[self.scale_shapes]
        yield Stored(".weight", part.shape, ("F8_E4M3",), is_codes=True)
        yield Stored(self.scale_end, shape, SCALES, axes, fill=FLOAT8_SCALE)
        if self.input_scale_end is not None:
            input_shape = () if self.scale_shapes == "tensor" else (1,)
            yield Stored(self.input_scale_end, input_shape, SCALES, (None,), fill=INPUT_SCALE)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes = float8_codes(part, tensors, ".weight")
        scales = checked_scales(part, tensors, self.scale_end).flatten().expand(len(codes)).contiguous()
        if self.input_scale_end is None:
            return Float8(codes, scales, rounds="float8 token" if self.rounds else None)
        input_scale = positive_scale(part, tensors, self.input_scale_end).item()
        return Float8(codes, scales, rounds="float8 static", input_scale=input_scale)


@dataclass(frozen=True)
class Online(PlainReader):
    """Plain numbers, rounded as they are loaded."""

    form = Float8
    bits = 8

    def round(self, weight_NK: Tensor) -> Coded:
        parts = [_rounded(rows) for rows in weight_NK.split(ROWS_AT_ONCE)]
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(FLOAT8)
        return Float8(codes, torch.cat([scales for _, scales in parts]).flatten(), rounds="float8 token")


def _rounded(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a scale per output: of those that let its largest number fit, up to twice as large as need be, the one
    that leaves the least squared error. It depends on where most numbers lie between two powers of two."""
    least = weight_NK.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / MAX_FLOAT8
    best_scale, best_error = least, torch.full_like(least, torch.inf)
    for step in range(NUM_SCALES):
        scale = least * 2 ** (step / NUM_SCALES)
        error = ((weight_NK / scale).to(FLOAT8).float() * scale - weight_NK).square().sum(1, keepdim=True)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    return (weight_NK / best_scale).to(FLOAT8), best_scale


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    if not settings:
        return while_loading(Online())
    choice(settings, "fmt", ("e4m3", None))
    is_static = choice(settings, "activation_scheme", ("dynamic", "static")) == "static"
    is_vllms = "ignored_layers" in settings  # checkpoints made for vLLM have names of their own
    skipped = [Modules(settings.get(key), key) for key in ("ignored_layers", "modules_to_not_convert")]
    block = settings.get("weight_block_size")
    reader: Reader
    if block is None and is_vllms:
        reader = Scaled(".weight_scale", "tensor", ".input_scale" if is_static else None)
    elif block is None:
        reader = Scaled(".weight_scale_inv", "tensor", ".activation_scale" if is_static else None)
    else:
        if block != [128, 128] or is_static:
            raise BadModelFileError("quantization_config: blocks of 128 x 128 with dynamic activations can be read")
        reader = Blocks((128, 128))

    def find(path: str, ways: Choice) -> MethodMaker:
        is_plain = ways.is_table or ways.use is Use.HEAD or any(path in listed for listed in skipped)
        return ways.plain if is_plain else ways.read_by(reader)

    return find
