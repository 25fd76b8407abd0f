"""The few forms of quantized weights: what the numbers are, not how a file or a kernel has them.

Files of `quant/` read a checkpoint's tensors into a form, or make one of plain numbers; `quant/kept` packs a form for
the device at hand. Knows tensors only.

Shape letters: N outputs, K inputs, G groups of neighbouring inputs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

# The values of the four-bit float E2M1, by code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, eq=False)
class TwoLevel:
    """Scales (or minimums) that are themselves whole numbers times a scale of several groups."""

    codes_NG: Tensor  # int8 or uint8
    outer_NS: Tensor  # any float; S divides G
    bits: int = 8  # 4: all codes are below 16

    @property
    def shape(self) -> torch.Size:
        return self.codes_NG.shape

    def float(self) -> Tensor:
        outer_NS = self.outer_NS.float()
        return (self.codes_NG.float().unflatten(1, (outer_NS.shape[1], -1)) * outer_NS.unsqueeze(2)).flatten(1)


@dataclass(frozen=True, eq=False)
class Affine:
    """Whole numbers of few bits: scale * (code - zero) + minimum, with a scale (and a minimum) per output and group."""

    SAID: ClassVar[str] = "weights of whole numbers"
    codes_NK: Tensor  # uint8, each below 2 ** bits
    scales_NG: Tensor | TwoLevel  # any float
    bits: int
    zero: int = 0
    mins_NG: Tensor | TwoLevel | None = None
    order_K: Tensor | None = None  # the input that each column multiplies; None: the column's own
    rounds: str | None = None  # activations: a key of ROUNDINGS, None: they stay as they are

    @property
    def group(self) -> int:
        return self.codes_NK.shape[1] // self.scales_NG.shape[1]

    @property
    def zeros_NG(self) -> Tensor | None:
        """The zero points, if the minimums say just that each group has its own."""
        scales, mins = self.scales_NG, self.mins_NG
        if not isinstance(scales, Tensor) or not isinstance(mins, TwoLevel) or mins.outer_NS.shape != scales.shape:
            return None
        return mins.codes_NG if torch.equal(mins.outer_NS, -scales) else None

    def numbers(self) -> Tensor:
        """The weight in float32, columns in the order of inputs."""
        values = self.codes_NK.float().unflatten(1, (-1, self.group))
        if self.zero:
            values -= self.zero
        values *= self.scales_NG.float().unsqueeze(2)
        if self.mins_NG is not None:
            values += self.mins_NG.float().unsqueeze(2)
        values = values.flatten(1)
        if self.order_K is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.order_K.long()] = values
        return ordered


@dataclass(frozen=True, eq=False)
class Float8:
    """Eight-bit floats (E4M3) times a scale per output, or per block of outputs and inputs."""

    SAID: ClassVar[str] = "weights of 8-bit floats"
    codes_NK: Tensor  # float8_e4m3fn
    scales: Tensor  # float32: [N], or [blocks of outputs, blocks of inputs]
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: a scale per output
    rounds: str | None = None
    input_scale: float | None = None  # for the rounding "float8 static"

    def scales_per_value(self) -> Tensor:
        """To be multiplied with the codes."""
        if self.block is None:
            return self.scales[:, None]
        N, K = self.codes_NK.shape
        by_row = self.scales.repeat_interleave(self.block[0], 0)[:N]
        return by_row.repeat_interleave(self.block[1], 1)[:, :K]

    def numbers(self) -> Tensor:
        return self.codes_NK.float() * self.scales_per_value()


@dataclass(frozen=True, eq=False)
class Table4:
    """Four-bit codes that stand for 16 values, times a scale per output and group of inputs."""

    SAID: ClassVar[str] = "weights of 4-bit codes"
    codes_NK: Tensor  # uint8, each below 16
    scales_NG: Tensor | TwoLevel  # any float, also float8_e4m3fn; or uint8: powers of two, 2 ** (byte - 127)
    table: tuple[float, ...] = E2M1
    outer_N: Tensor | None = None  # float32: a second scale per output

    @property
    def group(self) -> int:
        return self.codes_NK.shape[1] // self.scales_NG.shape[1]

    def numbers(self) -> Tensor:
        table = torch.tensor(self.table, device=self.codes_NK.device)
        values = table[self.codes_NK.int()].unflatten(1, (-1, self.group))
        values = (values * float_scales(self.scales_NG).unsqueeze(2)).flatten(1)
        return values if self.outer_N is None else values * self.outer_N[:, None]


@dataclass(frozen=True, eq=False)
class Plain:
    """Not quantized: one of the weights that a quantized checkpoint leaves as they are."""

    SAID: ClassVar[str] = "plain weights"
    values_NK: Tensor

    def numbers(self) -> Tensor:
        return self.values_NK.float()


@dataclass(frozen=True, eq=False)
class Blocks:
    """GGUF's blocks, as a file has them: they are one of the other forms, as which `codec` reads them."""

    SAID: ClassVar[str] = "the blocks of GGUF files"
    type_name: str
    raw: Tensor  # uint8
    shape: tuple[int, int]
    codec: Any  # the module ops/dequantize/gguf.py

    def parts(self, num_values: int) -> "Iterator[Blocks]":
        """It by outputs, about so many values at a time."""
        n, k = self.shape
        for rows in self.raw.view(n, -1).split(max(1, num_values // k)):
            yield replace(self, raw=rows.reshape(-1), shape=(len(rows), k))

    def decoded(self, device: torch.device) -> "Affine | Table4 | Plain":
        return self.codec.read_form(self.type_name, self.raw.to(device), self.shape)

    def numbers(self) -> Tensor:
        return self.codec.dequantize(self.type_name, self.raw, self.shape)


Coded = Affine | Float8 | Table4  # a code for each number
Form = Coded | Plain | Blocks

# How activations are rounded before a product, always row by row, so that company never changes a row.
ROUNDINGS = {
    "float8 token": "to float8, a scale per token",
    "float8 group": "to float8, a scale per token and 128 inputs",
    "float8 static": "to float8, with the checkpoint's scale",
    "int8 token": "to int8, a scale per token",
}


def float_scales(scales: Tensor | TwoLevel) -> Tensor:
    """In float32; bytes are exponents."""
    if isinstance(scales, Tensor) and scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127)
    return scales.float()


def stacked(parts: Iterable[Coded], num_rows: int) -> Coded:
    """One weight of so many outputs, from parts that have some of them each; no two parts need exist at once.

    Every tensor of theirs has a row for each output.
    """
    whole: Coded | None = None
    end = 0
    for part in parts:
        tensors = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
        if whole is None:
            empty: dict[str, Any] = {
                name: value.new_empty(num_rows, *value.shape[1:]) for name, value in tensors.items()
            }
            whole = replace(part, **empty)
        start, end = end, end + len(part.codes_NK)
        for name, value in tensors.items():
            getattr(whole, name)[start:end] = value
    if whole is None or end != num_rows:
        raise ValueError(f"parts have {end} of {num_rows} outputs")
    return whole


def weight_only(form: Coded) -> Coded:
    """The same numbers, multiplied with activations as they are."""
    return form if isinstance(form, Table4) else replace(form, rounds=None)
