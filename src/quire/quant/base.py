"""How a weight is declared, divided over ranks, kept and multiplied: the contract of every file in this folder.

A layer describes its weight as parts; `Layer.keep` (layers/base.py) finds the method of each by its path. A method
declares the tensors it wants of a checkpoint, loads them, and computes. It must not know layers, files or models.

Two ideas are kept apart. A `Reader` knows in which tensors a checkpoint of some quantization holds a weight, and reads
them into a form (`forms.py`). A `Quantized` method keeps forms on the device at hand and computes with them.
"""

import enum
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from quire.checkpoint.gguf import BLOCK
from quire.errors import UnsupportedModelError
from quire.ops.dequantize.gguf import dequantize
from quire.ops.packed_linear.forms import Blocks, Form

log = logging.getLogger(__name__)

INPUTS_STAY = "the checkpoint wants inputs rounded to 4 bits; they keep 16, with which its 4-bit weights are multiplied"
MAX_SHOWN_RANKS = 16  # numbers of ranks that an error suggests
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types of tensors that quantizations have beside the plain ones, in safetensors' names.
CODES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
}  # fmt: skip
Fill = float | Callable[[], Tensor]  # one value everywhere, or what makes all of them
SMALLEST_BLOCK = 32  # numbers, of what kernels for CPUs read and of most quantizations
LARGER_BLOCKS = (64, 128, 256)  # of others
MAX_EXCESS = 1 / 8  # how much larger than others a rank's part may be, so that no block is cut
# What the dimensions of a plain tensor are, by their number.
AXES: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("outputs",),
    2: ("outputs", "inputs"),
    3: ("experts", "outputs", "inputs"),
}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a checkpoint holds it, or a rank's part of it.

    `raw` is bytes, usually a view into the mapped file, never written to.
    """

    type_name: str  # GGUF's names: F32, BF16, Q4_1, …
    raw: Tensor  # uint8
    shape: tuple[int, ...]
    # For a tensor that several layers load: what `dense` returned, so that they share it.
    shared: dict[tuple[torch.dtype, torch.device], Tensor] | None = None

    def dense(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The numbers, in memory of their own. Plain types are copied to the device first and converted there."""
        device = torch.device(device)
        if self.shared is None:
            return self._dense(dtype, device)
        if (dtype, device) not in self.shared:
            self.shared[dtype, device] = self._dense(dtype, device)
        return self.shared[dtype, device]

    def values(self) -> Tensor:
        """As the checkpoint holds them, not copied; a power of two (E8M0) as its exponent's byte."""
        return self.raw.view((PLAIN | CODES)[self.type_name]).view(self.shape)

    def _dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.type_name not in PLAIN:
            return dequantize(self.type_name, self.raw, self.shape, dtype).to(device)
        values = self.raw.to(device).view(PLAIN[self.type_name]).view(self.shape)
        return values.to(dtype, copy=device.type == "cpu")


# ---- what a layer wants of a checkpoint, and how it is divided over ranks --------------------------------------------


class DivisionError(UnsupportedModelError):
    """There are more ranks than parts."""


class Section(NamedTuple):
    """A stretch of an axis, such as q, k or v of a fused projection.

    It is divided into equal units, such as heads, which are never cut.
    """

    size: int
    # Numbers of units that it may be divided into, the coarsest first. (): every rank has the whole section.
    units: tuple[int, ...] = ()
    # With fewer coarse units than ranks, several ranks share one: they have the same ("repeated"), or divide its finer
    # units ("nested"). "even": no unit is shared, and finer ones are taken if parts are more equal then.
    rule: Literal["even", "nested", "repeated"] = "even"
    block: int = SMALLEST_BLOCK  # "even": parts are whole blocks of so many numbers, if about equal ones can be

    def share(self, rank: int, num_ranks: int) -> tuple[int, int, int]:
        """(first unit of a rank, the one after its last, units in all)."""
        if not self.units:
            return 0, 1, 1
        coarse, finest = self.units[0], self.units[-1]
        if finest < num_ranks and self.rule != "repeated":
            raise DivisionError(f"{finest} heads, columns or rows to divide")
        if self.rule == "even":
            coarse = self._even_count(num_ranks)
        elif coarse < num_ranks:
            unit = coarse * rank // num_ranks
            if self.rule == "repeated":
                return unit, unit + 1, coarse
            sharing = [other for other in range(num_ranks) if coarse * other // num_ranks == unit]
            finer, place = finest // coarse, rank - sharing[0]
            bounds = [unit * finer + finer * idx // len(sharing) for idx in (place, place + 1)]
            if bounds[0] == bounds[1]:
                raise DivisionError(f"{coarse} KV heads, with {finer} query heads each, to divide")
            return bounds[0], bounds[1], finest
        return coarse * rank // num_ranks, coarse * (rank + 1) // num_ranks, coarse

    def _even_count(self, num_ranks: int) -> int:
        """Into how many units it is divided: such that parts are whole blocks, and equal, or nearly so.

        If that is not possible with blocks as large as wanted, then with the smallest; else parts are equal.
        """
        enough = [count for count in self.units if count >= num_ranks]
        blocks = [count for count in enough if self.size // count >= self.block]
        small_blocks = [count for count in enough if self.size // count >= SMALLEST_BLOCK]

        def excess(count: int) -> float:
            """Of the largest part over an equal one."""
            return -(-count // num_ranks) * num_ranks / count - 1

        wanted = [(counts, most) for counts in (blocks, small_blocks) for most in (0.0, MAX_EXCESS)] + [(enough, 0.0)]
        return next((count for counts, most in wanted for count in counts if excess(count) <= most), enough[0])

    def width(self, rank: int, num_ranks: int) -> int:
        """How much of it a rank has."""
        first, end, count = self.share(rank, num_ranks)
        return self.size * (end - first) // count

    def num_sharing(self, rank: int, num_ranks: int) -> int:
        """How many ranks before this one have the same part."""
        own = self.share(rank, num_ranks)
        return sum(self.share(other, num_ranks) == own for other in range(rank))


def even(size: int, block: int = SMALLEST_BLOCK) -> Section:
    """A section that may be cut anywhere: if possible between the blocks of any quantization."""
    units = [size // length for length in (256, 128, 64, 32, 16, 8) if size % length == 0]
    return Section(size, (*units, size), block=block)


# Raises UnsupportedModelError if a (rank, number of ranks) would cut numbers that are packed together.
Check = Callable[[int, int], None]


class CutError(UnsupportedModelError):
    """Numbers that are packed together would be cut."""

    def __init__(self, reason: str, num_ranks: int, possible: Sequence[int]) -> None:
        *others, last = map(str, possible)
        would_do = f"{', '.join(others)} or {last}" if others else last
        super().__init__(f"--tensor-parallel-size {num_ranks} would cut packed weights ({reason}): {would_do} would do")
        self.reason = reason
        self.num_ranks = num_ranks


def check_division(num_ranks: int, check: Check) -> None:
    if num_ranks > 1 and (why := _problem(num_ranks, check)):
        raise CutError(why, num_ranks, possible_divisions([check]))


def possible_divisions(checks: Iterable[Check]) -> list[int]:
    """Numbers of ranks with which all of it can be divided; 1 is one of them."""
    sizes = list(range(1, MAX_SHOWN_RANKS + 1))
    for check in checks:
        sizes = [size for size in sizes if size == 1 or not _problem(size, check)]
    return sizes


def _problem(num_ranks: int, check: Check) -> str:
    try:
        for rank in range(num_ranks):
            check(rank, num_ranks)
    except UnsupportedModelError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Split:
    """How a weight is divided over the ranks of a parallel group: along one axis, section by section."""

    axis: str  # outputs, inputs or experts
    sections: tuple[Section, ...]
    expert_idx: int | None = None  # of a tensor that belongs to one expert: the rank that has this expert loads it

    def slices(self, length: int, rank: int, num_ranks: int) -> list[slice]:
        """A rank's part of each section.

        `length`: of the tensor along the axis, which is less than the weight's if several values are packed together.
        """
        found = []
        whole = sum(section.size for section in self.sections)
        start = 0  # of the section
        for section in self.sections:
            *bounds, count = section.share(rank, num_ranks)
            # Where the part begins and ends, as a multiple of 1 / (whole * count).
            places = [(start * count + section.size * bound) * length for bound in bounds]
            if any(place % (whole * count) for place in places):
                raise UnsupportedModelError(
                    f"{whole} {self.axis} in packs of {-(-whole // length)} do not divide over {num_ranks} ranks"
                )
            found.append(slice(*(place // (whole * count) for place in places)))
            start += section.size
        return found


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint that a layer wants. Two layers that are tied want the same one."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[RawTensor], None]  # keeps the bytes no longer than until the other tensors of its part are loaded
    split: Split | None = None  # None: every rank has all of it
    axes: tuple[str | None, ...] = ()  # what its dimensions are, if not AXES of their number
    types: Collection[str] = frozenset(BLOCK)  # that the tensor may have
    num_values: int | None = None  # how many numbers of the model it holds; None: as many as it has entries
    stays_packed: bool = False  # takes as many bytes in memory as in the file
    optional: bool = False  # a checkpoint may lack it
    fill: Fill | None = None  # what a dummy of it holds; None: random numbers, or random codes
    num_bytes: int | None = None  # that it takes in memory; None: its numbers in the model's dtype

    def pieces(self, rank: int, num_ranks: int) -> list[tuple[slice, ...]]:
        """Where in the whole tensor the pieces are that a rank loads."""
        split = self.split
        axes = self.axes or AXES[len(self.shape)]
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
    HEAD = enum.auto()  # the same, to get the logits
    ROWS = enum.auto()  # looks rows up: `rows`
    TIED_ROWS = enum.auto()  # the same, of a table that is the head's weight too
    EXPERTS = enum.auto()  # takes the weights of all experts once they are loaded: `experts`
    NUMBERS = enum.auto()  # takes the numbers once they are loaded, and keeps no reference to the method


class Part(NamedTuple):
    """A weight, or one of several that are computed as one, as a checkpoint names it."""

    path: str  # without `end`: model.layers.0.self_attn.q_proj
    shape: tuple[int, ...]  # [outputs, inputs] or [experts, outputs, inputs]
    split: Split | None = None
    end: str = ".weight"  # of the plain tensor's name; "" if the path is the whole name
    rank: int = 0  # which part of it is kept here
    num_ranks: int = 1

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    def kept(self) -> "Part | None":
        """What this rank keeps, as a part of its own; None: other ranks have all of it."""
        if self.num_ranks == 1:
            return self
        pieces = Weight(self.path, self.shape, _ignore, self.split).pieces(self.rank, self.num_ranks)
        if not pieces:
            return None
        shape = list(self.shape)
        if pieces[0]:
            dim = len(pieces[0]) - 1
            shape[dim] = sum(piece[dim].stop - piece[dim].start for piece in pieces)
        return Part(self.path, tuple(shape), end=self.end)


class Method(ABC):
    """Keeps one weight, the rows of its parts one after the other, and computes with it. Tensors come in any order."""

    stays_packed = False  # its tensors stay as the file packs them

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        self.declared = parts
        self.parts = [kept for part in parts if (kept := part.kept()) is not None]  # what this rank has of them
        self.dtype = dtype
        self.device = device

    def weights(self) -> Iterator[Weight]:
        """Of all ranks' parts; the loader leaves out what this one does not have."""
        part_idx = 0
        for part in self.declared:
            yield from self.declare(part_idx, part)
            part_idx += part.kept() is not None

    def declare(self, part_idx: int, part: Part) -> Iterator[Weight]:
        """The tensors that a part consists of: here the plain one."""
        name = f"{part.path}{part.end}"
        load = partial(self.load_part, part_idx)
        yield Weight(name, part.shape, load, part.split, stays_packed=self.stays_packed)

    def load_part(self, part_idx: int, tensor: RawTensor) -> None:
        """Loads a part's plain tensor, in a method that declares it."""
        raise NotImplementedError

    @abstractmethod
    def numbers(self) -> Tensor:
        """The weight [outputs of all parts, inputs] in `dtype`; not a copy, if it is kept like that."""

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias, in `out_dtype` or x's own."""
        y = functional.linear(x, self.numbers(), bias)
        return y if out_dtype is None else y.to(out_dtype)

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """silu(gate) * up of the two halves of the outputs; uses `silu_mul` unless the method computes both at once."""
        return silu_mul(self.apply(x, bias))

    def check_share(self, rank: int, num_ranks: int) -> None:
        """UnsupportedModelError: such a rank's part would cut numbers that are packed together."""
        return

    def silu_mul(self, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        """What computes this layer's inputs from a gated layer's outputs, in the form that `apply` wants them in.

        Here as they are, by `plain`.
        """
        return plain

    def rms_norm(self, plain: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Any, Tensor]]:
        """The same for a norm's outputs."""
        return plain

    def rows(
        self, ids: Tensor, lookup: Callable[[Tensor, Tensor, int | None], Tensor], first: int | None = None
    ) -> Tensor:
        """The rows with these ids. `first`: the id of the first, where only some are kept here; others are zero.

        `lookup(ids, table, first)` takes them from a plain table.
        """
        return lookup(ids, self.numbers(), first)

    def experts(self, num_experts: int) -> Any:
        """The weight of each expert, as the backend at hand takes them (layers/experts)."""
        weight = self.numbers()
        return weight.view(num_experts, -1, weight.shape[-1])

    def tensors(self) -> list[Tensor]:
        """That hold the weight."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]


# Makes the method of a weight from (parts, dtype, device). Neighbouring parts whose makers are equal are one product.
MethodMaker = Callable[[Sequence[Part], torch.dtype, torch.device], Method]


ANY = -1  # in a shape: any length


class Stored(NamedTuple):
    """One of the tensors in which a checkpoint holds a weight."""

    end: str  # of its name: what follows the part's path
    shape: tuple[int, ...]
    types: Sequence[str]  # that it may have, the commonest first
    axes: tuple[str | None, ...] = ()  # what its dimensions are, if not AXES of their number
    is_codes: bool = False  # holds the weight's own numbers; others hold scales and the like
    unused: bool = False  # may be there, and is not needed
    fill: Fill | None = None  # what a dummy of it holds; None: random codes
    bits: float | None = None  # of an entry, if it is kept in others than its type's
    check: Callable[[Tensor], None] | None = None  # raises if the tensor contradicts the config, needed or not

    @property
    def num_bytes(self) -> int:
        """That it takes where it is kept as it is."""
        bits = self.bits or 8 * (PLAIN | CODES)[self.types[0]].itemsize
        return 0 if ANY in self.shape else int(math.prod(self.shape) * bits / 8)


class Reader(ABC):
    """How checkpoints of one quantization hold a weight. Two readers that are equal read alike."""

    form: ClassVar[type[Form] | None] = None  # that it reads; None: one or another

    @abstractmethod
    def stored(self, part: Part) -> Iterable[Stored]:
        """The tensors of a part. UnsupportedModelError: such a weight cannot be quantized like this."""

    def undivided(self, part: Part) -> str:
        """Why ranks cannot divide the inputs of a part, not even between blocks; empty if they can."""
        return ""

    def read_raw(self, part: Part, tensors: dict[str, RawTensor]) -> Form:
        """The form of a part (all its rows, if it is of several experts), from its tensors by the ends of their names.

        A reader overrides this one if the tensors' types tell how to read them.
        """
        return self.read(part, {end: tensor.values() for end, tensor in tensors.items()})

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        raise NotImplementedError


class Quantized(Method):
    """Keeps the forms of its parts. A subclass says how they are stored and multiplied."""

    keeps: ClassVar[Collection[type[Form]]] = ()  # in about as many bits as files have; others become plain numbers

    def __init__(self, reader: Reader, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(parts, dtype, device)
        self.reader = reader
        self.arrived: dict[int, dict[str, RawTensor]] = {}  # by index of the part, until it is complete

    def declare(self, part_idx: int, part: Part) -> Iterator[Weight]:
        stored = list(self.reader.stored(part))
        check_division(part.num_ranks, partial(self._check_part, part))
        needed = {tensor.end for tensor in stored if not tensor.unused}
        is_kept = self.reader.form in self.keeps
        if self.keeps and not is_kept and self.reader.form is not None:
            say_once(f"this device has no kernels for {self.reader.form.SAID}: they become {str(self.dtype)[6:]}")
        for tensor in stored:
            load = _ignore if tensor.unused else partial(self.load_tensor, part_idx, tensor.end, needed)
            if tensor.check is not None:
                load = partial(_load_checked, tensor.check, load)
            yield Weight(
                f"{part.path}{tensor.end}",
                tensor.shape,
                load,
                part.split,
                tensor.axes,
                tensor.types,
                num_values=math.prod(part.shape) if tensor.is_codes else 0,
                stays_packed=is_kept and self.reader.form is Blocks,
                optional=tensor.unused,
                fill=tensor.fill,
                num_bytes=tensor.num_bytes if is_kept and not tensor.unused else None,
            )

    def load_tensor(self, part_idx: int, end: str, needed: Collection[str], tensor: RawTensor) -> None:
        """The last of a part's tensors completes it."""
        arrived = self.arrived.setdefault(part_idx, {})
        arrived[end] = tensor
        if len(arrived) == len(needed):
            self.put_form(part_idx, self.reader.read_raw(self.parts[part_idx], self.arrived.pop(part_idx)))

    def check_share(self, rank: int, num_ranks: int) -> None:
        for part in self.declared:
            self._check_part(part, rank, num_ranks)

    def _check_part(self, part: Part, rank: int, num_ranks: int) -> None:
        is_cut = num_ranks > 1 and part.split is not None and part.split.axis == "inputs"
        if is_cut and (why := self.reader.undivided(part)):
            raise UnsupportedModelError(f"{part.path}: {why}")
        kept = part._replace(rank=rank, num_ranks=num_ranks).kept()
        if kept is not None:
            list(self.reader.stored(kept))

    @abstractmethod
    def put_form(self, part_idx: int, form: Form) -> None:
        """Keeps a part."""


def _ignore(tensor: RawTensor) -> None:
    pass


def _load_checked(check: Callable[[Tensor], None], load: Callable[[RawTensor], None], tensor: RawTensor) -> None:
    check(tensor.values())
    load(tensor)


# Makes a method that keeps forms from (reader, parts, dtype, device).
QuantizedMaker = Callable[[Reader, Sequence[Part], torch.dtype, torch.device], Quantized]


@dataclass(frozen=True)
class _ReadBy:
    make: QuantizedMaker
    reader: Reader

    def __call__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Quantized:
        return self.make(self.reader, parts, dtype, device)


@cache
def say_once(text: str) -> None:
    """What is done in another way than the checkpoint says, or slower than it could be."""
    log.warning("%s", text)


class Choice(NamedTuple):
    """What a file of this folder chooses from, for a weight of some use on the device at hand."""

    use: Use
    plain: MethodMaker
    quantized: QuantizedMaker
    is_gpu: bool = False  # GPU kernels compute with it

    @property
    def is_table(self) -> bool:
        """Rows are looked up."""
        return self.use in (Use.ROWS, Use.TIED_ROWS)

    def read_by(self, reader: Reader) -> MethodMaker:
        return _ReadBy(self.quantized, reader)


T = TypeVar("T")


def runs_of(parts: dict[int, T], joinable: Callable[[T, T], bool]) -> list[list[T]]:
    """The parts in the order of their indices, neighbours that can be joined in one list."""
    runs: list[list[T]] = []
    for _, part in sorted(parts.items()):
        if runs and joinable(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


class Joined(Method):
    """Parts with different methods, computed one after the other."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = methods

    def weights(self) -> Iterator[Weight]:
        for method in self.methods:
            yield from method.weights()

    def check_share(self, rank: int, num_ranks: int) -> None:
        for method in self.methods:
            method.check_share(rank, num_ranks)

    def numbers(self) -> Tensor:
        return torch.cat([method.numbers() for method in self.methods])

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        y = torch.cat([method.apply(x, None, out_dtype) for method in self.methods], -1)
        return y if bias is None else y + bias

    def tensors(self) -> list[Tensor]:
        return [held for method in self.methods for held in method.tensors()]
