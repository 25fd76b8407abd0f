"""How a weight is declared, divided over ranks, kept and multiplied: the contract of every file in this folder.

A layer describes its weight as parts; `Layer.keep` (layers/base.py) finds the method of each by its path. A method declares the
tensors it wants of a checkpoint, takes them in, and computes. It must not know layers, files or models.
"""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.checkpoint.gguf import BLOCK
from quire.errors import UnsupportedModelError
from quire.ops.dequantize.gguf import dequantize

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What the dimensions of a plain tensor run over, by their number.
AXES = {1: ("outputs",), 2: ("outputs", "inputs"), 3: ("experts", "outputs", "inputs")}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a checkpoint holds it: `raw` is bytes, usually a view into the mapped file, never written to."""

    type_name: str  # GGUF's names: F32, BF16, Q4_1, …
    raw: Tensor  # uint8
    shape: tuple[int, ...]
    shared: dict | None = None  # where several layers want the same numbers: what `dense` gave, to be given again

    def dense(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The numbers, in memory of their own. What needs no decoding goes to the device as it is and is converted there."""
        device = torch.device(device)
        if self.shared is None:
            return self._dense(dtype, device)
        if (dtype, device) not in self.shared:
            self.shared[dtype, device] = self._dense(dtype, device)
        return self.shared[dtype, device]

    def _dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return dequantize(self.type_name, self.raw, self.shape, dtype)
        if self.type_name not in PLAIN:
            return dequantize(self.type_name, self.raw, self.shape, dtype).to(device)
        return self.raw.to(device).view(PLAIN[self.type_name]).view(self.shape).to(dtype)


# ---- what a layer wants of a checkpoint, and how it is divided over ranks --------------------------------------------


class Section(NamedTuple):
    """A stretch of an axis, such as q, k or v of a fused projection: it is cut into equal units, such as heads, that stay whole."""

    size: int
    # How many units: the first count that has one for each rank, else the last, and then ranks share units. (): ranks take it whole.
    units: tuple[int, ...] = ()

    def share(self, rank: int, num_ranks: int) -> tuple[int, int, int]:
        """(first unit of a rank, the one behind its last, units in all)."""
        if not self.units:
            return 0, 1, 1
        count = next((count for count in self.units if count >= num_ranks), self.units[-1])
        first = count * rank // num_ranks
        return first, max(first + 1, count * (rank + 1) // num_ranks), count


@dataclass(frozen=True)
class Split:
    """How a weight is divided over the ranks of a parallel group: along one axis, section by section."""

    axis: str  # outputs, inputs or experts
    sections: tuple[Section, ...]
    expert_idx: int | None = None  # of a tensor that is one expert's: the rank that has this one takes it

    def slices(self, length: int, rank: int, num_ranks: int) -> list[slice]:
        """A rank's part of each section, where a tensor has `length` entries along the axis: fewer than the weight if it is packed."""
        found, start, whole = [], 0, sum(section.size for section in self.sections)
        for section in self.sections:
            *bounds, count = section.share(rank, num_ranks)
            places = [(start * count + section.size * bound) * length for bound in bounds]
            if any(place % (whole * count) for place in places):
                raise UnsupportedModelError(
                    f"weights of {whole} {self.axis} in packs of {whole // length} do not divide over {num_ranks} ranks"
                )
            found.append(slice(*(place // (whole * count) for place in places)))
            start += section.size
        return found


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint that a layer wants. Two layers that are tied want the same one."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[RawTensor], None]  # the bytes are kept, at most, until the rest of their part has come
    split: Split | None = None  # None: every rank has all of it
    axes: tuple[str | None, ...] = ()  # what its dimensions run over, where they are not AXES of their number
    types: Collection[str] = frozenset(BLOCK)  # that it may come in
    num_values: int | None = None  # numbers of the model that it stands for, where they are not its own
    stays_packed: bool = False  # takes as many bytes as in the file

    def pieces(self, rank: int, num_ranks: int) -> list[tuple[slice, ...]]:
        """Where in the whole tensor the pieces are that a rank takes."""
        split, axes = self.split, self.axes or AXES[len(self.shape)]
        if split is None:
            return [()]
        if split.axis in axes:
            dim = axes.index(split.axis)
            return [(slice(None),) * dim + (piece,) for piece in split.slices(self.shape[dim], rank, num_ranks)]
        if split.expert_idx is None:
            return [()]
        first, end, _ = split.sections[0].share(rank, num_ranks)
        return [()] if first <= split.expert_idx < end else []


# ---- methods ---------------------------------------------------------------------------------------------------------


class Use(enum.Enum):
    """What a layer does with its weight."""

    PRODUCT = enum.auto()  # multiplies by it: `apply`
    ROWS = enum.auto()  # looks rows up: `rows`
    NUMBERS = enum.auto()  # takes the numbers, once they are loaded, and lets the method go


class Part(NamedTuple):
    """A weight, or one of several that are computed as one, as a checkpoint names it."""

    path: str  # without the end: model.layers.0.self_attn.q_proj
    shape: tuple[int, ...]  # [outputs, inputs] or [experts, outputs, inputs]
    split: Split | None = None
    end: str = ".weight"  # of the plain tensor's name; "" where the path itself names it

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class Method(ABC):
    """Keeps one weight, whose parts lie one below the other, and computes with it. Tensors arrive in any order."""

    stays_packed = False  # its tensors stay as the file packs them

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        self.parts, self.dtype, self.device = parts, dtype, device

    def weights(self) -> Iterator[Weight]:
        for part_idx, part in enumerate(self.parts):
            yield from self.declare(part_idx, part)

    def declare(self, part_idx: int, part: Part) -> Iterator[Weight]:
        """The tensors that a part consists of: here the plain one."""
        yield Weight(
            f"{part.path}{part.end}",
            part.shape,
            partial(self.load_part, part_idx),
            part.split,
            stays_packed=self.stays_packed,
        )

    def load_part(self, part_idx: int, tensor: RawTensor) -> None:
        """A part's plain tensor, of a method that declares it."""
        raise NotImplementedError

    @abstractmethod
    def numbers(self) -> Tensor:
        """The weight [outputs of all parts, inputs] in `dtype`: the very tensor where there is one."""

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias, in `out_dtype` or x's own."""
        y = functional.linear(x, self.numbers(), bias)
        return y if out_dtype is None else y.to(out_dtype)

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(gate) * up of the two halves; with `silu_mul` where the method has no way of its own."""
        return silu_mul(self.apply(x, bias))

    def rows(self, ids: Tensor, lookup: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The rows that `ids` name; `lookup(ids, table)` finds them in a plain table."""
        return lookup(ids, self.numbers())

    def memory(self) -> dict[int, int]:
        """What it occupies: address -> bytes."""
        return {value.data_ptr(): value.nbytes for value in vars(self).values() if isinstance(value, Tensor)}


class Joined(Method):
    """Parts with different methods, computed one after the other."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = methods

    def weights(self) -> Iterator[Weight]:
        for method in self.methods:
            yield from method.weights()

    def numbers(self) -> Tensor:
        return torch.cat([method.numbers() for method in self.methods])

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        y = torch.cat([method.apply(x, None, out_dtype) for method in self.methods], -1)
        return y if bias is None else y + bias

    def memory(self) -> dict[int, int]:
        return {address: size for method in self.methods for address, size in method.memory().items()}
