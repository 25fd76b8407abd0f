"""Packed weights in plain torch: their layout, how forms and GGUF blocks are converted to it, the product.

Twin of `ops/packed_linear/cpu.py`. Called by tests, as the oracle, and by that module for everything but kernels. Knows
nothing of models and files.

Shape letters: P panels of 16 outputs, B blocks of 32 inputs. A weight is scale * (q - zero) + min, with a scale and a
min for each output and group of inputs. `data` holds q in the order drawn in `ops/cpu/src/linear.cpp`: the sixteen
outputs of a panel side by side, four bytes each, so that one 512-bit load serves sixteen outputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.gguf import BLOCK as GGUF_BLOCK
from quire.errors import ConfigError, UnsupportedModelError
from quire.ops.dequantize.gguf import read_form
from quire.ops.elementwise.reference import embedding
from quire.ops.packed_linear.forms import Affine, Plain, Table4, TwoLevel, float_scales

LANES = 16  # outputs in a panel
BLOCK = 32  # inputs in a block
BYTE_ORDER = [0, 2, 1, 3]  # of four neighbouring inputs in their 32-bit lane; the permutation is its own inverse
CODE_BITS = (2, 3, 4, 5, 6, 8)
VALUES_AT_ONCE = 1 << 18  # of a weight that is packed
BYTE_TABLE, FLOAT_TABLE = 104, 204  # kinds of weights, as in src/packed.h
PLAIN = ("F32", "F16", "BF16")
Allocate = Callable[..., Tensor]  # as torch.empty


@dataclass(frozen=True, eq=False)
class Scales:
    """Scales, or minimums, of a weight."""

    # [P, groups, 16] float16 or float32; int8, which `outer` multiplies; uint8: 2 ** (value - 128).
    # Minimums may be zero points, int8 without `outer`: -zero * the scale.
    # With `outer`, uint8 [P, groups / 2, 16]: four bits for each of two neighbouring groups, the first in the low ones.
    values: Tensor
    outer: Tensor | None = None  # float16 [P, outer groups, 16]

    @property
    def are_exponents(self) -> bool:
        return self.values.dtype == torch.uint8 and self.outer is None

    @property
    def are_nibbles(self) -> bool:
        return self.values.dtype == torch.uint8 and self.outer is not None

    @property
    def are_zeros(self) -> bool:
        return self.values.dtype == torch.int8 and self.outer is None

    def in_float32(self) -> Tensor:
        """[outputs, groups, 1]"""
        values = self.values.float()
        if self.are_exponents:
            values = torch.exp2(values - 128)
        elif self.are_nibbles:
            values = torch.stack((self.values & 15, self.values >> 4), 2).flatten(1, 2).float()
        if self.outer is not None:
            values = values * self.outer.float().repeat_interleave(values.shape[1] // self.outer.shape[1], 1)
        return values.transpose(1, 2).reshape(-1, values.shape[1], 1)

    def bound(self) -> float:
        """No scale is larger."""
        largest = 15.0 if self.are_nibbles else _largest(self.values)
        if self.are_exponents:
            return 2.0 ** (largest - 128)
        return largest if self.outer is None else largest * _largest(self.outer)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.values] if self.outer is None else [self.values, self.outer]


def _largest(values: Tensor) -> float:
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item())


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The weight [n, k] of a linear layer; `bits` 16 holds bf16 itself and has no scales."""

    data: Tensor  # uint8 [P, B, bytes of a block]
    scales: Scales | None
    mins: Scales | None  # None where all are zero
    n: int
    k: int
    bits: int
    group: int = BLOCK  # inputs that share a scale: 16, or a multiple of 32
    zero: int = 0
    table: Tensor | None = None  # [16], what codes stand for: uint8, of which `zero` is taken away, or float32
    order: Tensor | None = None  # the input that each column multiplies

    @cached_property
    def kind(self) -> int:
        """Which kernels compute with it: see src/packed.h."""
        if self.table is None:
            return self.bits
        return BYTE_TABLE if self.table.dtype == torch.uint8 else FLOAT_TABLE

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data, *(tensor for scales in (self.scales, self.mins) if scales for tensor in scales.tensors)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantize(self) -> Tensor:
        """The weight as float32 [n, k], exactly."""
        P, B, _ = self.data.shape
        if self.scales is None:  # bf16
            lanes = self.data.view(torch.bfloat16).view(P, B * BLOCK // 2, LANES, 2).transpose(1, 2)
            return lanes.reshape(P * LANES, self.k)[: self.n].float()
        vectors = _from_planes(self.data.view(P, B, self.bits, LANES, 4), self.bits)
        codes = vectors[..., BYTE_ORDER].permute(0, 3, 1, 2, 4).reshape(P * LANES, -1, self.group)
        values = codes.float() if self.table is None else self.table.float()[codes.int()]
        scales = self.scales.in_float32()
        weight = (values - self.zero) * scales
        if self.mins is not None:
            mins = self.mins.in_float32()
            weight = weight + (-mins * scales if self.mins.are_zeros else mins)
        weight = weight.view(P * LANES, self.k)[: self.n]
        if self.order is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.order] = weight
        return ordered

    @cached_property
    def dense(self) -> Tensor:
        """The weight in bf16, for the product in plain torch."""
        return self.dequantize().bfloat16()


def _from_planes(stored: Tensor, bits: int) -> Tensor:
    """The eight vectors of codes of each block, from the vectors that are stored: both [P, B, vectors, 16, 4]."""
    if bits == 8:
        return stored
    if bits < 4:
        codes = torch.cat([stored[:, :, i : i + 1] >> shift & 3 for i in (0, 1) for shift in (0, 2, 4, 6)], 2)
        return codes | _bit_of_each(stored[:, :, 2:3]) << 2 if bits == 3 else codes
    codes = torch.cat((stored[:, :, :4] & 15, stored[:, :, :4] >> 4), 2)
    if bits == 5:
        return codes | _bit_of_each(stored[:, :, 4:5]) << 4
    if bits == 6:
        return codes | _from_planes(stored[:, :, 4:6], 2) << 4
    return codes


def _bit_of_each(vector: Tensor) -> Tensor:
    return torch.cat([vector >> j & 1 for j in range(8)], 2)


def _to_planes(codes: Tensor, bits: int) -> Tensor:
    """What `_from_planes` undoes."""
    if bits == 8:
        return codes
    if bits < 4:
        fours = codes.unflatten(2, (2, 4)) & 3
        low = fours[:, :, :, 0] | fours[:, :, :, 1] << 2 | fours[:, :, :, 2] << 4 | fours[:, :, :, 3] << 6
        return torch.cat((low, _bits_together(codes >> 2)), 2) if bits == 3 else low
    low = codes[:, :, :4] & 15 | codes[:, :, 4:] << 4
    if bits == 5:
        return torch.cat((low, _bits_together(codes >> 4)), 2)
    if bits == 6:
        return torch.cat((low, _to_planes(codes >> 4, 2)), 2)
    return low


def _bits_together(bits: Tensor) -> Tensor:
    vector = bits[:, :, :1].clone()
    for j in range(1, 8):
        vector |= bits[:, :, j : j + 1] << j
    return vector


# ---- packing ----


def packable(form: Affine | Table4) -> bool:
    """Whether `pack_form` takes it."""
    n, k = form.codes_NK.shape
    is_code = isinstance(form, Table4) or form.bits in CODE_BITS
    return n > 0 and k > 0 and k % BLOCK == 0 and (form.group == 16 or form.group % BLOCK == 0) and is_code


def pack_form(form: Affine | Table4, allocate: Allocate = torch.empty) -> PackedWeight:
    n, k = form.codes_NK.shape
    P, B = -(-n // LANES), k // BLOCK
    bits, zero, table, mins, order = 4, 0, None, None, None
    scales: Scales
    if isinstance(form, Table4):
        table, zero, factor = _byte_table(form.table)
        scales = _pack_scales(form.scales_NG, P, factor, form.outer_N)
    else:
        bits, zero = form.bits, form.zero
        scales = _pack_scales(form.scales_NG, P)
        mins = _pack_mins(form, P)
        order = None if form.order_K is None else form.order_K.long()
    data = allocate((P, B, LANES * BLOCK * bits // 8), dtype=torch.uint8)
    num_panels = max(1, VALUES_AT_ONCE // (LANES * k))
    for rows, packed in zip(form.codes_NK.split(num_panels * LANES), data.split(num_panels)):
        vectors = _lanes(rows, len(packed)).view(-1, LANES, B, 8, 4).permute(0, 2, 3, 1, 4)[..., BYTE_ORDER]
        packed.copy_(_to_planes(vectors, bits).reshape(packed.shape))
    return PackedWeight(data, scales, mins, n, k, bits, form.group, zero, table, order)


def _lanes(rows: Tensor, P: int) -> Tensor:
    """[n, …] as [P, 16, …], with zeros for outputs beyond n."""
    return F.pad(rows, (0, 0, 0, P * LANES - len(rows))).view(P, LANES, -1)


def _byte_table(table: tuple[float, ...]) -> tuple[Tensor, int, float]:
    """The values as bytes, the zero to take away of these and the factor that scales lack; or as floats."""
    values = torch.tensor(table)
    for factor in (1.0, 0.5):
        whole = values / factor
        if torch.equal(whole, whole.round()) and whole.abs().max() <= 127:
            return (whole + 128).to(torch.uint8), 128, factor
    return values, 0, 1.0


def _pack_mins(form: Affine, P: int) -> Scales | None:
    if form.mins_NG is None:
        return None
    zeros_NG = form.zeros_NG
    if zeros_NG is not None and _fits_int8(zeros_NG):
        return Scales(_placed(zeros_NG.to(torch.int8), P))
    return _pack_scales(form.mins_NG, P)


def _placed(values_NG: Tensor, P: int) -> Tensor:
    return _lanes(values_NG, P).transpose(1, 2).contiguous()


def _pack_scales(scales: Tensor | TwoLevel, P: int, factor: float = 1.0, outer_N: Tensor | None = None) -> Scales:
    """As few bytes as lose nothing."""
    if outer_N is None and isinstance(scales, TwoLevel) and factor == 1.0:
        if scales.bits == 4 and scales.shape[1] % 2 == 0 and _fits_half(scales.outer_NS):
            low, high = scales.codes_NG.unflatten(1, (-1, 2)).unbind(2)
            return Scales(_placed(low | high << 4, P), _placed(scales.outer_NS.half(), P))
        if _fits_int8(scales.codes_NG) and _fits_half(scales.outer_NS):
            return Scales(_placed(scales.codes_NG.to(torch.int8), P), _placed(scales.outer_NS.half(), P))
    if outer_N is None and isinstance(scales, Tensor) and scales.dtype == torch.uint8 and factor == 0.5:
        return Scales(_placed(scales, P))
    values = float_scales(scales) * factor
    if outer_N is not None:
        values = values * outer_N[:, None]
    return Scales(_placed(values.half() if _fits_half(values) else values, P))


def _fits_int8(codes: Tensor) -> bool:
    return codes.dtype == torch.int8 or int(codes.max()) < 128


def _fits_half(values: Tensor) -> bool:
    return torch.equal(values.half().float(), values.float())


@functools.cache
def _sample(type_name: str) -> PackedWeight:
    """A panel of one block of a GGUF type: what its packed weights look like."""
    elements, num_bytes = GGUF_BLOCK[type_name]
    raw = torch.full((LANES * num_bytes,), 0x40, dtype=torch.uint8)
    return pack_form(_read(type_name, raw, LANES, elements))


def _read(type_name: str, raw: Tensor, n: int, k: int) -> Affine | Table4:
    form = read_form(type_name, raw, (n, k))
    if isinstance(form, Plain):
        raise ConfigError(f"weights of type {type_name} are not packed")
    return form


def gguf_packable(type_name: str, n: int, k: int) -> bool:
    """Whether `pack_gguf` takes a weight of this type and shape."""
    return type_name in GGUF_BLOCK and type_name not in PLAIN and n > 0 and k > 0 and k % GGUF_BLOCK[type_name][0] == 0


def empty_gguf(type_name: str, raw: Tensor, n: int, k: int, allocate: Allocate = torch.empty) -> PackedWeight:
    """An unfilled weight for `pack_gguf`, after checking that `raw` fits the type and the shape."""
    if not gguf_packable(type_name, n, k):
        raise UnsupportedModelError(f"a {type_name} weight of {n} x {k} cannot be packed: dequantize it instead")
    elements, num_bytes = GGUF_BLOCK[type_name]
    expected = n * k // elements * num_bytes
    if raw.dtype != torch.uint8 or not raw.is_contiguous() or raw.numel() != expected:
        raise ConfigError(f"a {type_name} weight of {n} x {k} needs {expected} contiguous bytes, got {raw.numel()}")
    sample = _sample(type_name)
    P = -(-n // LANES)

    def empty(like: Tensor) -> Tensor:
        return allocate((P, like.shape[1] * k // elements, like.shape[2]), dtype=like.dtype)

    def empty_scales(like: Scales | None) -> Scales | None:
        return None if like is None else Scales(*map(empty, like.tensors))

    return replace(
        sample, data=empty(sample.data), scales=empty_scales(sample.scales), mins=empty_scales(sample.mins), n=n, k=k
    )


def empty_dense(weight: Tensor, allocate: Allocate = torch.empty) -> PackedWeight:
    """An unfilled weight for `pack_dense`."""
    n, k = weight.shape
    if n == 0 or k == 0 or k % BLOCK:
        raise UnsupportedModelError(f"a weight of {n} x {k} cannot be packed: inputs must be a multiple of {BLOCK}")
    data = allocate((-(-n // LANES), k // BLOCK, LANES * BLOCK * 2), dtype=torch.uint8)
    return PackedWeight(data, None, None, n, k, 16)


def pack_gguf(type_name: str, raw: Tensor, n: int, k: int) -> PackedWeight:
    empty_gguf(type_name, raw, n, k)  # checks
    return pack_form(_read(type_name, raw, n, k))


def pack_dense(weight: Tensor) -> PackedWeight:
    """Keeps a float weight [n, k] as bf16."""
    packed = empty_dense(weight)
    P = packed.data.shape[0]
    rows = F.pad(weight.bfloat16(), (0, 0, 0, P * LANES - packed.n))
    pairs = rows.view(P, LANES, packed.k // 2, 2).transpose(1, 2).contiguous()
    packed.data.copy_(pairs.view(torch.uint8).view(packed.data.shape))
    return packed


def joinable(first: PackedWeight, second: PackedWeight) -> bool:
    """Whether `concat` can put the outputs of `second` after those of `first`."""
    return first.n % LANES == 0 and _layout(first) == _layout(second) and _same(first.order, second.order)


def gateable(w: PackedWeight) -> bool:
    """Whether `linear_silu_mul` takes this weight."""
    return w.n % (2 * LANES) == 0


def concat(
    weights: list[PackedWeight],
    allocate: Allocate = torch.empty,
    stays: Callable[[Tensor], bool] = lambda tensor: False,
) -> PackedWeight:
    """One weight with the outputs of all, in order, for fused projections. All need one layout and whole panels.

    `stays`: whether a tensor that needs no joining is kept as it is, not copied.
    """
    first = weights[0]
    if any(_layout(w) != _layout(first) or not _same(w.order, first.order) for w in weights):
        raise ConfigError("packed weights of different layouts cannot be fused: keep them as separate layers")
    if any(w.n % LANES for w in weights[:-1]):
        raise ConfigError(f"packed weights can be fused only where outputs are multiples of {LANES}")

    def joined(parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) == 1 and stays(parts[0]):
            return parts[0]
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return torch.cat(parts, out=allocate(shape, dtype=parts[0].dtype))

    def joined_scales(parts: list[Scales | None]) -> Scales | None:
        present = [part.tensors for part in parts if part is not None]
        return Scales(*map(joined, zip(*present, strict=True))) if present else None

    return replace(
        first,
        data=joined(tuple(w.data for w in weights)),
        scales=joined_scales([w.scales for w in weights]),
        mins=joined_scales([w.mins for w in weights]),
        n=sum(w.n for w in weights),
    )


def split(w: PackedWeight, num_parts: int) -> list[PackedWeight]:
    """The weight's outputs in equal parts, not copied where these are whole panels."""
    size = w.n // num_parts
    if size % LANES:
        return [pack_dense(part) for part in w.dequantize().split(size)]

    def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split(size // LANES)

    def scales_of(scales: Scales | None) -> list[Scales | None]:
        if scales is None:
            return [None] * num_parts
        return [Scales(*tensors) for tensors in zip(*map(pieces, scales.tensors), strict=True)]

    parts = zip(pieces(w.data), scales_of(w.scales), scales_of(w.mins), strict=True)
    return [replace(w, data=data, scales=scales, mins=mins, n=size) for data, scales, mins in parts]


def _layout(w: PackedWeight) -> tuple[object, ...]:
    scales = [(tensor.dtype, tensor.shape[1:]) for part in (w.scales, w.mins) if part for tensor in part.tensors]
    table = None if w.table is None else tuple(w.table.tolist())
    return w.k, w.bits, w.group, w.zero, table, w.mins is None, *scales


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


# ---- product ----


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, k] in bf16 times the weight, plus a float32 bias: [T, n] in bf16 or float32."""
    y = F.linear(x, w.dense).to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


def linear_silu_mul(x: Tensor, w: PackedWeight) -> Tensor:
    """silu(gate) * up where gate and up are the halves of `linear(x, w)`: [T, n / 2] in bf16."""
    gate, up = linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def rows(ids: Tensor, w: PackedWeight, first: int | None = None) -> Tensor:
    """The rows of the weight with these ids, in bf16 [T, k]."""
    return embedding(ids, w.dense, first)
