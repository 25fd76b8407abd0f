"""GPTQ: whole numbers of 2, 4 or 8 bits in 32-bit words along the inputs, with scales and zero points per group.

Checkpoints of AutoRound in the same packing are read here too (`auto_round.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.ops.packed_linear.forms import Affine, Form, TwoLevel
from quire.quant._checked import finite
from quire.quant._dummy import group_of_input, signed_scales, word
from quire.quant._select import Modules, Stretches, choice, group_size, objects, patterns, refuse
from quire.quant.base import Choice, MethodMaker, Part, Reader, Stored, Use

HALVES = ("F16", "BF16", "F32")
FORMATS = ("gptq", "gptq_v2")
ORDERED = "its groups are of inputs in any order, not of neighbours"


@dataclass(frozen=True)
class Gptq(Reader):
    bits: int
    group: int  # inputs; 0: all of them
    adds_one: bool  # zero points are stored minus one
    has_order: bool  # groups are of inputs that `g_idx` names, not of neighbours
    form = Affine

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        per_word = 32 // self.bits
        num_groups = self._num_groups(part)
        axes = (None if num_groups == 1 else "inputs", "outputs")
        if n % per_word or k % per_word:
            raise UnsupportedModelError(f"{part.path} has {n} x {k} weights, which words of {per_word} do not divide")
        yield Stored(".qweight", (k // per_word, n), ("I32",), ("inputs", "outputs"), is_codes=True)
        zeros = word(self.bits, 2 ** (self.bits - 1) - self.adds_one)
        yield Stored(".qzeros", (num_groups, n // per_word), ("I32",), axes, fill=zeros)
        scales = partial(signed_scales, self.bits, n)
        yield Stored(".scales", (num_groups, n), HALVES, axes, fill=scales)
        yield stored_order(part, ".g_idx", k // num_groups, self.has_order)

    def undivided(self, part: Part) -> str:
        return ORDERED if self.has_order and self._num_groups(part) > 1 else ""

    def _num_groups(self, part: Part) -> int:
        k = part.shape[-1]
        group = self.group or k
        if k % group:
            raise BadModelFileError(f"{part.path} has {k} inputs, which groups of {group} do not divide")
        return k // group

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes_NK = fields(tensors[".qweight"], self.bits).transpose(0, 1).flatten(1)
        words = tensors[".qzeros"]
        if self.adds_one:  # to the words, so that a carry reaches the neighbour it was borrowed from
            words = words + sum(1 << shift for shift in range(0, 32, self.bits))
        zeros_GN = fields(words, self.bits).flatten(1)
        scales_NG = finite(part, tensors, ".scales").T
        order_K = None
        if self.has_order:
            order_K = group_order(part, tensors, ".g_idx", self._num_groups(part))
            codes_NK = codes_NK if order_K is None else codes_NK[:, order_K.long()].contiguous()
        return affine(codes_NK, scales_NG, zeros_GN.T, self.bits, order_K)


def fields(words: Tensor, bits: int) -> Tensor:
    """The numbers of 2, 4 or 8 bits in 32-bit words, low bits first: [..., words] -> uint8 [..., words, 32 / bits]."""
    packed = words.contiguous().view(torch.uint8)
    found = packed.new_empty(*packed.shape, 8 // bits)
    for place in range(8 // bits):
        torch.bitwise_and(packed >> place * bits, 2**bits - 1, out=found[..., place])
    return found.view(*words.shape, 32 // bits)


def affine(codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, bits: int, order_K: Tensor | None = None) -> Affine:
    """scale * (code - zero), where zero points are whole numbers."""
    first = int(zeros_NG.flatten()[0])
    if bool((zeros_NG == first).all()):
        return Affine(codes_NK, scales_NG.contiguous(), bits, first, None, order_K)
    return Affine(codes_NK, scales_NG.contiguous(), bits, 0, TwoLevel(zeros_NG, -scales_NG), order_K)


def stored_order(part: Part, end: str, group: int, has_order: bool) -> Stored:
    """The tensor that says which group each input is in. Where the config says that groups are of neighbours, so must
    this tensor, if there is one."""
    k = part.shape[-1]
    check = None if has_order else partial(_check_neighbours, f"{part.path}{end}", group)
    fill = partial(group_of_input, k, group)
    return Stored(end, (k,), ("I32",), ("inputs",), unused=not has_order, fill=fill, check=check)


def _check_neighbours(name: str, group: int, group_of_K: Tensor) -> None:
    """Of any stretch of the inputs. The same number everywhere says nothing."""
    found = group_of_K - group_of_K[:1]
    neighbours = group_of_input(len(found), group).to(found)
    if bool(found.any()) and not torch.equal(found, neighbours):
        raise BadModelFileError(f"{name} has inputs in another order than the config says, which names none")


def group_order(part: Part, tensors: dict[str, Tensor], end: str, num_groups: int) -> Tensor | None:
    """The inputs sorted by their groups; None if they are."""
    group_of_K = tensors[end]
    counts = torch.bincount(group_of_K.clamp(0, num_groups).long(), minlength=num_groups + 1)
    is_even = bool((group_of_K >= 0).all()) and bool((counts[:num_groups] == len(group_of_K) // num_groups).all())
    if not is_even:
        raise BadModelFileError(f"{part.path}{end} does not give each of {num_groups} groups as many inputs")
    order_K = group_of_K.argsort(stable=True).int()
    is_sorted = bool((order_K[1:] > order_K[:-1]).all())
    return None if is_sorted else order_K


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    default = _reader(settings)
    skipped = Modules(settings.get("modules_to_not_convert"), "modules_to_not_convert")
    has_head = choice(settings, "lm_head", (False, True), False)
    listed = Stretches(settings.get("modules_in_block_to_quantize"), "modules_in_block_to_quantize")
    rules = _rules(settings)

    def find(path: str, ways: Choice) -> MethodMaker:
        is_head = ways.use is Use.HEAD
        is_listed = is_head or not listed.whole or path in listed
        if ways.is_table or (is_head and not has_head) or path in skipped or not is_listed:
            return ways.plain
        for known, reader in rules:
            if known.match(path):
                return ways.plain if reader is None else ways.read_by(reader)
        return ways.read_by(default)

    return find


def _reader(settings: dict[str, Any]) -> Gptq:
    refuse(settings, "rotation", "adapter", "is_marlin_format")
    bits = choice(settings, "bits", (2, 4, 8))
    choice(settings, "pack_dtype", ("int32", None))
    formats = {choice(settings, key, (*FORMATS, None)) for key in ("checkpoint_format", "format")} - {None}
    if len(formats) > 1:
        raise BadModelFileError("quantization_config gives checkpoint_format and format, which contradict each other")
    has_order = choice(settings, "desc_act", (True, False), False)
    return Gptq(bits, group_size(settings), adds_one="gptq_v2" not in formats, has_order=has_order)


def _rules(settings: dict[str, Any]) -> list[tuple[Any, Gptq | None]]:
    """What `dynamic` says of some weights: another form, or (None) none at all. The first pattern that fits counts."""
    dynamic = objects(settings, "dynamic")
    compiled = patterns((text[2:] if text[:2] in ("+:", "-:") else text for text in dynamic), "dynamic")
    readers = [None if text.startswith("-:") else _reader({**settings, **values}) for text, values in dynamic.items()]
    return list(zip(compiled, readers))
