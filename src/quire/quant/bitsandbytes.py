"""bitsandbytes: four-bit codes by a table (nf4, fp4) with a scale for each 64, or int8 with a scale per output."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.ops.packed_linear.forms import Affine, Form, Table4
from quire.quant._checked import finite
from quire.quant._dummy import whole_scale
from quire.quant._select import Modules, choice
from quire.quant.base import ANY, Choice, MethodMaker, Part, Reader, Stored, Use

BLOCK = 64
NESTED_BLOCK = 256
MAX_STATE_BYTES = 4096
MAX_OFFSET = 2.0**127


@dataclass(frozen=True)
class FourBits(Reader):
    kind: str  # nf4 or fp4
    is_nested: bool  # scales are 8-bit codes themselves
    form = Table4

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        num_blocks = n * k // BLOCK
        if k % BLOCK:
            raise UnsupportedModelError(f"{part.path} has {k} inputs, which blocks of {BLOCK} do not divide")
        yield Stored(".weight", (n * k // 2, 1), ("U8",), ("outputs", None), is_codes=True)
        # Dummies have 16 values from -1 to 1 and, where scales are nested, the scale itself as the offset of zeros.
        scale = 7.5 * whole_scale(4)
        absmax_type, absmax = ("U8", 0.0) if self.is_nested else ("F32", scale)
        yield Stored(".weight.absmax", (num_blocks,), (absmax_type,), ("outputs",), fill=absmax)
        yield Stored(".weight.quant_map", (16,), ("F32",), (None,), fill=partial(torch.linspace, -1, 1, 16))
        state = partial(self._dummy_state, n, k, scale)
        yield Stored(self._state_end, (ANY,), ("U8",), (None,), fill=state, check=partial(self._check_state, part))
        if self.is_nested:
            nested = -(-num_blocks // NESTED_BLOCK)
            yield Stored(".weight.nested_absmax", (nested,), ("F32",), ("outputs",), fill=1.0)
            yield Stored(".weight.nested_quant_map", (256,), ("F32",), (None,), fill=0.0)

    def undivided(self, part: Part) -> str:
        return "its rows follow each other in one run of blocks"

    def _dummy_state(self, n: int, k: int, offset: float) -> Tensor:
        state = {"quant_type": self.kind, "blocksize": BLOCK, "shape": [n, k], "nested_offset": offset}
        return torch.tensor(list(json.dumps(state).encode()))

    @property
    def _state_end(self) -> str:
        return f".weight.quant_state.bitsandbytes__{self.kind}"

    def _check_state(self, part: Part, data: Tensor) -> None:
        """`part`: the whole weight, of which a rank may have some outputs."""
        n, k = part.shape[-2:]
        name = f"{part.path}{self._state_end}"
        state = _state(name, data)
        blocks = state.get("blocksize"), state.get("nested_blocksize", NESTED_BLOCK)
        if (*blocks, state.get("quant_type"), state.get("shape")) != (BLOCK, NESTED_BLOCK, self.kind, [n, k]):
            raise BadModelFileError(f"{name} does not tell of {n} x {k} weights in {self.kind} and blocks of {BLOCK}")

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        n, k = part.shape[-2:]
        packed = tensors[".weight"].view(n, k // 2)
        codes = torch.stack((packed >> 4, packed & 15), -1).view(n, k)  # the earlier one in the high bits
        scales = tensors[".weight.absmax"]
        if self.is_nested:
            outer = finite(part, tensors, ".weight.nested_absmax").repeat_interleave(NESTED_BLOCK)[: len(scales)]
            inner = finite(part, tensors, ".weight.nested_quant_map")[scales.int()]
            scales = inner * outer + _offset(f"{part.path}{self._state_end}", tensors[self._state_end])
        table = tuple(finite(part, tensors, ".weight.quant_map").tolist())
        end = ".weight.absmax"
        return Table4(codes, finite(part, {end: scales}, end).view(n, k // BLOCK), table)


def _state(name: str, data: Tensor) -> dict[str, Any]:
    if len(data) > MAX_STATE_BYTES:
        raise BadModelFileError(f"{name} is longer than {MAX_STATE_BYTES} bytes")
    try:
        state = json.loads(bytes(data.tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise BadModelFileError(f"{name} is not a JSON object")
    return state


def _offset(name: str, data: Tensor) -> float:
    offset: Any = _state(name, data).get("nested_offset")
    is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
    if not is_number or not -MAX_OFFSET < offset < MAX_OFFSET:
        raise BadModelFileError(f"{name} gives nested_offset as {offset!r:.40}, which is not a finite number")
    return float(offset)


@dataclass(frozen=True)
class Int8(Reader):
    """A scale per output; activations stay in 16 bits."""

    form = Affine

    def stored(self, part: Part) -> Iterable[Stored]:
        yield Stored(".weight", part.shape, ("I8",), is_codes=True)
        yield Stored(".SCB", (part.shape[0],), ("F32",), ("outputs",), fill=127 * whole_scale(8))
        yield Stored(".weight_format", (), ("U8",), unused=True)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes = tensors[".weight"].view(torch.uint8) ^ 128
        return Affine(codes, finite(part, tensors, ".SCB")[:, None] * (1 / 127), 8, zero=128)


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    is_4bit, is_8bit = (_flag(settings, name) for name in ("load_in_4bit", "load_in_8bit"))
    if is_4bit == is_8bit:
        raise BadModelFileError("quantization_config: one of load_in_4bit and load_in_8bit must be true")
    reader: Reader = Int8()
    if is_4bit:
        kind = choice(settings, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        reader = FourBits(kind, choice(settings, "bnb_4bit_use_double_quant", (True, False), False))
    skipped = Modules(settings.get("llm_int8_skip_modules"), "llm_int8_skip_modules")

    def find(path: str, ways: Choice) -> MethodMaker:
        is_plain = ways.is_table or ways.use is Use.HEAD or path in skipped
        return ways.plain if is_plain else ways.read_by(reader)

    return find


def _flag(settings: dict[str, Any], name: str) -> bool:
    return any(choice(settings, key, (True, False, None)) for key in (name, f"_{name}"))
