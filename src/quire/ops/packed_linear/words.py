"""Packed weights for GPUs in plain torch: their layout, how forms are brought into it, and the product.

Twin of `triton.py`, `tiles.py` and `many_rows.py`. Called by tests, as the oracle, and by `quant/kept/triton.py` for
packing. Knows forms and tensors only.

Codes are stored in one of two ways. Where activations are rounded to 8 bits too, codes are bytes in order of inputs, as
the library's products want them. Otherwise they are 32-bit words of several planes: with 4 bits, 128 inputs are a run
of 16 words, of which four bits each (plane 0) are inputs 0 to 15, four others (plane 1) inputs 16 to 31, and so on
(`bit_of_plane`). So a plane of four words, which one thread loads at once, multiplies four neighbouring inputs; and a
plane of a run, as it lies in registers, is what tensor cores take for 16 inputs. The last run is filled up with zeros.

Shape letters: M rows, N outputs, K inputs, G groups of inputs that share a scale, W words (or bytes) of a row.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.packed_linear.forms import E2M1, Affine, Coded, Float8, Table4, TwoLevel, float_scales
from quire.ops.rounding.reference import FLOAT8, GROUP_INPUTS, round_vectors

RUN = 16  # neighbouring words, and neighbouring inputs of one plane
HALVES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
LARGEST_POWER = 136  # of two, 2 ** 9 as a byte: of larger ones (never seen) the rest becomes a scale of outputs


@dataclass(frozen=True, eq=False)
class WordWeight:
    """The weight [N, K] of a linear layer."""

    kind: str  # what a code means: "affine", "int8" (with a sign), "e2m1", "table" or "e4m3"
    codes: Tensor  # [N, W] int32 words; or bytes [N, K], uint8 or float8_e4m3fn
    # [N, G], or for every `rows` outputs one: a scale for each group; uint8 are powers of two, int8 whole numbers that
    # `scales_NS` multiplies, int32 pairs (`pair`). None: only `outer_N`.
    scales_NG: Tensor | None
    k: int
    bits: int
    group: int  # inputs that share a scale; all of them, if scales are per output only
    rows: int = 1  # outputs that share a scale of a group
    zero: int = 0  # affine: the code of the value 0 (plus minimum)
    mins_NG: Tensor | None = None  # float32; int8 are whole numbers that `mins_NS` multiplies
    # What a word of `scales_NG` has in its lower and upper half: a scale in 16 bits ("float16" or "bfloat16"), and of
    # the same type a minimum, or a whole number, the code of zero ("minimums", "zeros"). So all kernels' loads have
    # four bytes or more, which can be under way while they compute.
    pair: str | None = None
    scales_NS: Tensor | None = None  # float32: a scale of several groups, S divides G
    mins_NS: Tensor | None = None
    outer_N: Tensor | None = None  # float32: a scale per output, on top of the others
    table: Tensor | None = None  # float32 [16]
    order_K: Tensor | None = None  # the input that each column multiplies
    rounds: str | None = None  # of activations (`forms.ROUNDINGS`)
    input_scale: float | None = None
    one: Tensor | None = None  # 1.0, which the library's product of float8 wants as scales
    run: int = RUN  # words that are neighbours, and neighbouring inputs of one plane

    @property
    def n(self) -> int:
        return len(self.codes)

    @property
    def planes(self) -> int:
        """Codes of a word; 1: codes are bytes."""
        return 32 // self.bits if self.codes.dtype == torch.int32 else 1

    @cached_property
    def in_words(self) -> "WordWeight":
        """The same with bytes seen as words: runs of one, whose planes are neighbouring inputs."""
        return self if self.planes > 1 else replace(self, codes=self.codes.view(torch.int32), run=1)

    def groups_of(self, outer_NS: Tensor | None) -> int:
        """How many groups share a scale of scales."""
        return 1 if outer_NS is None else -(-self.k // self.group) // outer_NS.shape[1]

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Its tensors, in the order in which kernels take them."""
        levels = (self.scales_NG, self.scales_NS, self.mins_NG, self.mins_NS)
        return as_bytes(self.codes), *levels, self.outer_N, self.table

    def constants(self) -> dict[str, Any]:
        """What kernels want to know of it when they are compiled."""
        return {
            "K": self.k,
            "W": self.codes.shape[1],
            "KIND": self.kind,
            "BITS": self.bits,
            "PLANES": self.planes,
            "RUN": self.run,
            "GROUP": self.group,
            "G": 1 if self.scales_NG is None else self.scales_NG.shape[1],
            "PAIR": self.pair,
            "SCALES_GROUPS": self.groups_of(self.scales_NS),
            "MINS_GROUPS": self.groups_of(self.mins_NS),
            "ROWS": self.rows,
        }

    @cached_property
    def loads_of_lane(self) -> int:
        """How many scales, minimums and outer ones come with the codes of a run."""
        present = (self.scales_NG, self.scales_NS, self.mins_NG, self.mins_NS)
        sets = 1 if self.scales_in_words else self.run * self.planes // self.set_inputs
        return sets * sum(tensor is not None for tensor in present)

    @cached_property
    def scales_in_words(self) -> bool:
        """Whether a run has four scales (and minimums) of a byte, which can be loaded as one word.

        Powers of two, or whole numbers with an outer scale."""
        levels = [(self.scales_NG, self.scales_NS), (self.mins_NG, self.mins_NS)]
        return self.group == self.set_inputs == self.run * self.planes // 4 and all(
            codes_NG is None
            or (
                (codes_NG.dtype == torch.uint8 or (codes_NG.element_size() == 1 and self.groups_of(outer_NS) % 4 == 0))
                and codes_NG.shape[1] % 4 == 0
            )
            for codes_NG, outer_NS in levels
        )

    @property
    def folds_scales(self) -> bool:
        """Whether tensor cores multiply values that are scaled already: then scales are padded, bytes in fours."""
        if self.scales_NG is None or self.scales_NS is not None:
            return False
        return self.kind == "e2m1" and self.scales_NG.element_size() == 1 and self.group in (16, 32)

    @property
    def set_inputs(self) -> int:
        """Of a run's inputs, so many neighbours at least have one scale."""
        run_inputs = self.run * self.planes
        if self.group >= self.k and not self.folds_scales:
            return run_inputs
        return math.gcd(run_inputs, self.group)

    def codes_NK(self) -> Tensor:
        """The codes in the order of columns, one per element."""
        if self.kind == "int8":
            return self.codes ^ 128
        if self.planes == 1:
            return self.codes
        bits = [bit_of_plane(self.kind, self.bits, plane) for plane in range(self.planes)]
        shifts = torch.tensor(bits, dtype=torch.int32, device=self.codes.device)
        fields = self.codes.view(self.n, -1, 1, RUN) >> shifts[:, None]
        codes = (fields & 2**self.bits - 1).to(torch.uint8).reshape(self.n, -1)[:, : self.k].contiguous()
        return codes.view(FLOAT8) if self.kind == "e4m3" else codes

    def numbers(self) -> Tensor:
        """The weight in float32, columns in the order of inputs."""
        codes = self.codes_NK()
        scales = torch.ones(self.n, 1, device=codes.device)
        if self.scales_NG is not None:
            scales_NG = self.scales_NG[:, : -(-self.k // self.group)]
            scales = float_scales(_levels(scales_NG, self.scales_NS))
        mins = None if self.mins_NG is None else _levels(self.mins_NG, self.mins_NS)
        if self.pair is not None and self.scales_NG is not None:
            scales, mins = _apart_again(self.scales_NG, self.pair)
        if self.kind == "e4m3" and self.scales_NG is not None:
            values = Float8(codes, scales, (self.rows, self.group)).numbers()
        elif self.kind == "e4m3":
            values = codes.float()
        elif self.kind in ("affine", "int8"):
            values = Affine(codes, scales, self.bits, self.zero, mins, self.order_K).numbers()
        else:
            values = Table4(codes, scales, tuple(self.table.tolist()) if self.table is not None else E2M1).numbers()
        return values if self.outer_N is None else values * self.outer_N[:, None]

    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]


class ExpertWords(NamedTuple):
    """The weights of a mixture's experts, the rows of one after those of another."""

    weight: WordWeight
    num_experts: int

    @property
    def num_outputs(self) -> int:
        """Of one expert."""
        return self.weight.n // self.num_experts


# ---- packing ---------------------------------------------------------------------------------------------------------


def pack(form: Coded) -> WordWeight | None:
    """None: the kernels take no such weight."""
    if isinstance(form, Float8):
        return _pack_float8(form)
    k = form.codes_NK.shape[1]
    if k % 32 or form.group % 16:
        return None
    if isinstance(form, Table4):
        is_e2m1 = form.table == E2M1
        table = None if is_e2m1 else torch.tensor(form.table, device=form.codes_NK.device)
        kind = "e2m1" if is_e2m1 else "table"
        scales_NG, scales_NS = _apart(form.scales_NG, 4)
        outer_N = form.outer_N
        if scales_NG.dtype == torch.uint8 and int(scales_NG.max()) > LARGEST_POWER:
            over_N1 = (scales_NG.int().amax(1, keepdim=True) - LARGEST_POWER).clamp(min=0)
            scales_NG = (scales_NG.int() - over_N1).clamp(min=0).to(torch.uint8)
            powers_N = torch.exp2(over_N1.flatten().float())
            outer_N = powers_N if outer_N is None else outer_N * powers_N
        packed = WordWeight(kind, _words(form.codes_NK, 4, kind), scales_NG, k, 4, form.group, table=table)
        packed = replace(packed, outer_N=outer_N, scales_NS=scales_NS)
        return replace(packed, scales_NG=_padded(scales_NG, packed)) if packed.folds_scales else packed
    if form.rounds == "int8 token":
        # The library multiplies numbers with a sign.
        scales_N = form.scales_NG.float().flatten()
        signed = form.codes_NK ^ 128
        return WordWeight("int8", signed, None, k, 8, k, zero=form.zero, outer_N=scales_N, rounds=form.rounds)
    bits = 4 if form.bits <= 4 else 8
    paired = _paired(form)
    if paired is not None:
        words_NG, pair = paired
        codes = _words(form.codes_NK, bits, "affine")
        return WordWeight("affine", codes, words_NG, k, bits, form.group, pair=pair, order_K=form.order_K)
    scales_NG, scales_NS = _apart(form.scales_NG, form.bits)
    mins_NG, mins_NS = (None, None) if form.mins_NG is None else _apart(form.mins_NG, form.bits)
    if mins_NG is not None and mins_NS is None:
        mins_NG = mins_NG.float()
    return WordWeight(
        "affine",
        _words(form.codes_NK, bits, "affine"),
        scales_NG,
        k,
        bits,
        form.group,
        zero=form.zero,
        mins_NG=mins_NG,
        scales_NS=scales_NS,
        mins_NS=mins_NS,
        order_K=form.order_K,
    )


def _pack_float8(form: Float8) -> WordWeight | None:
    codes = form.codes_NK.contiguous()
    k = codes.shape[1]
    if k % 16:
        return None
    if form.rounds is None:
        codes = _words(codes.view(torch.uint8), 8, "e4m3")
    packed = WordWeight("e4m3", codes, None, k, 8, k, rounds=form.rounds, input_scale=form.input_scale)
    if form.block is None:
        return replace(packed, outer_N=form.scales, one=torch.ones((), device=codes.device))
    rows, group = form.block
    return replace(packed, scales_NG=form.scales.contiguous(), rows=rows, group=group)


def _apart(scales: Tensor | TwoLevel, bits: int) -> tuple[Tensor, Tensor | None]:
    """Scales of groups, and of several groups if those are whole numbers that fit into int8.

    All do, but for zero points of weights with 8 bits.
    """
    if isinstance(scales, Tensor):
        return (scales if scales.element_size() == 1 else scales.float()).contiguous(), None
    if bits == 8:
        return scales.float(), None
    return scales.codes_NG.contiguous().view(torch.int8), scales.outer_NS.float().contiguous()


def _paired(form: Affine) -> tuple[Tensor, str] | None:
    """Scales and zero points, or minimums, in the halves of words, if scales are numbers of 16 bits."""
    scales, mins = form.scales_NG, form.mins_NG
    if not isinstance(scales, Tensor) or scales.dtype not in HALVES:
        return None
    upper = torch.full_like(scales, form.zero, dtype=torch.int32)
    second = "zeros"
    if isinstance(mins, Tensor) and mins.dtype == scales.dtype and form.zero == 0:
        upper, second = mins.contiguous().view(torch.int16).int(), "minimums"
    elif (zeros := form.zeros_NG) is not None:
        upper = upper + zeros.int()
    elif mins is not None:
        return None
    lower = scales.contiguous().view(torch.int16).int() & 0xFFFF
    return upper << 16 | lower, f"{HALVES[scales.dtype]} {second}"


def _apart_again(words_NG: Tensor, pair: str) -> tuple[Tensor, Tensor]:
    """(scales, minimums) in float32."""
    dtype = torch.float16 if pair.startswith("float16") else torch.bfloat16
    scales_NG = words_NG.to(torch.int16).view(dtype).float()
    upper_NG = (words_NG >> 16).to(torch.int16)
    return scales_NG, upper_NG.view(dtype).float() if pair.endswith("minimums") else -scales_NG * upper_NG.float()


def _levels(scales_NG: Tensor, outer_NS: Tensor | None) -> Tensor | TwoLevel:
    return scales_NG if outer_NS is None else TwoLevel(scales_NG, outer_NS)


def _padded(scales_NG: Tensor, w: WordWeight) -> Tensor:
    """Scales of whole runs, zeros past the last input."""
    num_groups = w.codes.shape[1] * w.planes // w.group
    bytes_NG = scales_NG.view(torch.uint8)
    return functional.pad(bytes_NG, (0, num_groups - bytes_NG.shape[1])).view(scales_NG.dtype)


def bit_of_plane(kind: str, bits: int, plane: int) -> int:
    """Where a word has the code of a plane.

    Of whole numbers with four bits, planes 0 to 3 are the lower halves of bytes, so that these are cut out at once."""
    return plane % 4 * 8 + plane // 4 * 4 if (kind, bits) == ("affine", 4) else bits * plane


def _words(codes_NK: Tensor, bits: int, kind: str) -> Tensor:
    """Codes in words, plane by plane."""
    n, k = codes_NK.shape
    planes = functional.pad(codes_NK, (0, -k % (RUN * 32 // bits))).view(n, -1, 32 // bits, RUN)
    words = torch.zeros(n, planes.shape[1], RUN, dtype=torch.int32, device=codes_NK.device)
    for plane in range(32 // bits):
        words |= planes[:, :, plane].int() << bit_of_plane(kind, bits, plane)
    return words.view(n, -1)


def joinable(first: WordWeight, second: WordWeight) -> bool:
    """Whether `concat` can put the outputs of `second` after those of `first`."""
    same_order = first.order_K is second.order_K is None or (
        first.order_K is not None and second.order_K is not None and torch.equal(first.order_K, second.order_K)
    )
    return same_order and first.n % first.rows == 0 and _layout(first) == _layout(second)


def _layout(w: WordWeight) -> tuple[object, ...]:
    optional = (w.scales_NG, w.mins_NG, w.scales_NS, w.mins_NS, w.outer_N)
    dtypes = tuple(None if tensor is None else (tensor.dtype, tensor.shape[1:]) for tensor in optional)
    table = None if w.table is None else tuple(w.table.tolist())
    return w.kind, w.codes.dtype, w.k, w.bits, w.zero, w.group, w.pair, w.rows, w.rounds, w.input_scale, dtypes, table


PER_OUTPUT = ("codes", "scales_NG", "mins_NG", "scales_NS", "mins_NS", "outer_N")  # tensors with rows of outputs


def stacked(parts: Iterable[WordWeight | None], n: int) -> WordWeight | None:
    """One weight with the `n` outputs of all, in order; no two parts need exist at once. None: they are not alike."""
    whole: WordWeight | None = None
    end = 0
    for part in parts:
        if part is None or (whole is not None and _layout(part) != _layout(whole)):
            return None
        whole = whole or _empty_like(part, n)
        for name in PER_OUTPUT:
            rows = getattr(part, name)
            if rows is not None:
                start = end // part.rows if name == "scales_NG" else end
                as_bytes(getattr(whole, name))[start : start + len(rows)] = as_bytes(rows)
        end += part.n
    return whole


def _empty_like(part: WordWeight, n: int) -> WordWeight:
    """With `n` outputs, whose rows are still to come."""
    tensors: dict[str, Any] = {}
    for name in PER_OUTPUT:
        rows = getattr(part, name)
        if rows is not None:
            num_rows = -(-n // part.rows) if name == "scales_NG" else n
            tensors[name] = rows.new_empty(num_rows, *rows.shape[1:])
    return replace(part, **tensors)


def concat(weights: list[WordWeight]) -> WordWeight:
    """One weight with the outputs of all, in order, which are alike."""
    whole = weights[0] if len(weights) == 1 else stacked(weights, sum(weight.n for weight in weights))
    if whole is None:
        raise ValueError("weights of several layouts")
    return whole


def as_bytes(codes: Tensor) -> Tensor:
    """Float8 as bytes, which all of torch and Triton know; other codes as they are."""
    return codes.view(torch.uint8) if codes.dtype == FLOAT8 else codes


# ---- product ---------------------------------------------------------------------------------------------------------


def round_rows(x_MK: Tensor, rounds: str, input_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Activations as codes (float8 or int8), and their scales in float32: [M, 1], or one per group of inputs."""
    K = x_MK.shape[1]
    group = GROUP_INPUTS if rounds == "float8 group" else K
    groups = functional.pad(x_MK, (0, -K % group)).unflatten(1, (-1, group))
    dtype = torch.int8 if rounds == "int8 token" else FLOAT8
    codes, scales_MG = round_vectors(groups, dtype, (input_scale or 1.0) if rounds == "float8 static" else None)
    return codes.flatten(1)[:, :K], scales_MG


def linear(x_MK: Tensor, w: WordWeight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b, summed in float32, rounded to x's dtype, then converted to `out_dtype`."""
    x = x_MK.float()
    if w.rounds is not None:
        codes, scales = round_rows(x_MK, w.rounds, w.input_scale)
        repeats = GROUP_INPUTS if scales.shape[1] > 1 else w.k
        x = codes.float() * scales.repeat_interleave(repeats, 1)[:, : w.k]
    y = functional.linear(x, w.numbers(), None if bias_N is None else bias_N.float())
    return y.to(x_MK.dtype).to(out_dtype or x_MK.dtype)
