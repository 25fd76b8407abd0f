"""Packed weights in plain torch: their layout, how GGUF blocks are converted to it, the product.

Twin of `ops/packed_linear/cpu.py`. Called by tests, as the oracle, and by that module for everything but kernels. Knows
nothing of models and files.

Shape letters: P panels of 16 outputs, B blocks of 32 inputs. A weight is scale * (q - zero) + min, with a scale and a
min for each output and group of 32 or 16 inputs. `data` holds q in the order drawn in `ops/cpu/src/linear.cpp`: the
sixteen outputs of a panel side by side, four bytes each, so that one 512-bit load serves sixteen outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import ConfigError, UnsupportedModelError

LANES = 16  # outputs in a panel
BLOCK = 32  # inputs in a block
BYTE_ORDER = [0, 2, 1, 3]  # of four neighbouring inputs in their 32-bit lane; the permutation is its own inverse


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The weight [n, k] of a linear layer; `bits` 16 holds bf16 itself and has no scales."""

    data: Tensor  # uint8 [P, B, bytes of a block]
    scales: Tensor | None  # float16 or float32 [P, K / group, 16]
    mins: Tensor | None  # like scales; None where all are zero
    n: int
    k: int
    bits: int
    group: int = BLOCK
    zero: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.mins) if part is not None)

    def dequantize(self) -> Tensor:
        """The weight as float32 [n, k], exactly."""
        P, B, _ = self.data.shape
        if self.scales is None:  # bf16
            lanes = self.data.view(torch.bfloat16).view(P, B * BLOCK // 2, LANES, 2).transpose(1, 2)
            return lanes.reshape(P * LANES, self.k)[: self.n].float()
        q = self.data.view(P, B, -1, LANES, 4)
        q = q[..., BYTE_ORDER]
        if self.bits == 4:
            q = torch.cat((q & 15, q >> 4), dim=2)
        q = q.permute(0, 3, 1, 2, 4).reshape(P * LANES, -1, self.group)
        weight = (q.float() - self.zero) * _per_output(self.scales)
        if self.mins is not None:
            weight = weight + _per_output(self.mins)
        return weight.view(P * LANES, self.k)[: self.n]

    @cached_property
    def dense(self) -> Tensor:
        """The weight in bf16, for the product in plain torch."""
        return self.dequantize().bfloat16()


def _per_output(scales: Tensor) -> Tensor:
    return scales.transpose(1, 2).reshape(-1, scales.shape[1], 1).float()


# ---- formats ----

Decoded = tuple[Tensor, Tensor, Tensor | None]  # q uint8 [blocks, weights], scales and mins float32 [blocks, groups]


@dataclass(frozen=True)
class PackedFormat:
    """A GGUF type: `block_bytes` hold `block_weights` weights. How they are packed, and how to decode them in torch."""

    block_bytes: int
    block_weights: int
    bits: int
    decode: Callable[[Tensor], Decoded]
    zero: int = 0
    group: int = BLOCK
    has_min: bool = False
    scale_dtype: torch.dtype = torch.float16  # float32 where a scale is a product that float16 cannot hold


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    return torch.cat((qs & 15, qs >> 4), dim=1)


def _fifth_bits(bytes_: Tensor) -> Tensor:
    bits = bytes_[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _k_nibbles(qs: Tensor) -> Tensor:
    """Of 128 bytes: each run of 32 holds one group of 32 in its low nibbles and the next group in its high nibbles."""
    runs = qs.view(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and mins in twelve bytes; upper bits of the last four are in spare bits of the first four."""
    first, second, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=1)
    mins = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=1)
    return _half(blocks, 0) * scales.float(), -(_half(blocks, 2) * mins.float())


def _q4_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> Decoded:
    return _k_nibbles(blocks[:, 16:].contiguous()), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Decoded:
    upper = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _k_nibbles(blocks[:, 48:].contiguous()) | upper.flatten(1) << 4, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Decoded:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2).flatten(1)
    high = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return low | high << 4, _half(blocks, 208) * scales, None


FORMATS = {
    "Q4_0": PackedFormat(18, 32, 4, _q4_0, zero=8),
    "Q4_1": PackedFormat(20, 32, 4, _q4_1, has_min=True),
    "Q4_K": PackedFormat(144, 256, 4, _q4_k, has_min=True, scale_dtype=torch.float32),
    "Q5_0": PackedFormat(22, 32, 8, _q5_0, zero=16),
    "Q5_1": PackedFormat(24, 32, 8, _q5_1, has_min=True),
    "Q5_K": PackedFormat(176, 256, 8, _q5_k, has_min=True, scale_dtype=torch.float32),
    "Q6_K": PackedFormat(210, 256, 8, _q6_k, zero=32, group=16, scale_dtype=torch.float32),
    "Q8_0": PackedFormat(34, 32, 8, _q8_0, zero=128),
}


def packable(type_name: str, n: int, k: int) -> bool:
    """Whether `pack_gguf` (or, for F32, F16 and BF16, `pack_dense`) takes a weight of this type and shape."""
    if type_name in ("F32", "F16", "BF16"):
        return n > 0 and k > 0 and k % BLOCK == 0
    return type_name in FORMATS and n > 0 and k > 0 and k % FORMATS[type_name].block_weights == 0


# ---- packing ----


def empty_gguf(type_name: str, raw: Tensor, n: int, k: int) -> PackedWeight:
    """An unfilled weight for `pack_gguf`, after checking that `raw` fits the type and the shape."""
    if not packable(type_name, n, k):
        raise UnsupportedModelError(f"a {type_name} weight of {n} x {k} cannot be packed: dequantize it instead")
    form = FORMATS[type_name]
    expected = n * k // form.block_weights * form.block_bytes
    if raw.dtype != torch.uint8 or not raw.is_contiguous() or raw.numel() != expected:
        raise ConfigError(f"a {type_name} weight of {n} x {k} needs {expected} contiguous bytes, got {raw.numel()}")
    P, B = -(-n // LANES), k // BLOCK
    data = torch.empty(P, B, LANES * BLOCK * form.bits // 8, dtype=torch.uint8)
    scales = torch.empty(P, k // form.group, LANES, dtype=form.scale_dtype)
    mins = torch.empty_like(scales) if form.has_min else None
    return PackedWeight(data, scales, mins, n, k, form.bits, form.group, form.zero)


def empty_dense(weight: Tensor) -> PackedWeight:
    """An unfilled weight for `pack_dense`."""
    n, k = weight.shape
    if not packable("BF16", n, k):
        raise UnsupportedModelError(f"a weight of {n} x {k} cannot be packed: inputs must be a multiple of {BLOCK}")
    data = torch.empty(-(-n // LANES), k // BLOCK, LANES * BLOCK * 2, dtype=torch.uint8)
    return PackedWeight(data, None, None, n, k, 16)


def pack_gguf(type_name: str, raw: Tensor, n: int, k: int) -> PackedWeight:
    packed = empty_gguf(type_name, raw, n, k)
    form = FORMATS[type_name]
    q, scales, mins = form.decode(raw.view(-1, form.block_bytes))
    _fill(packed, q, scales, mins)
    return packed


def pack_codes(
    codes_NK: Tensor, scales_NG: Tensor, mins_NG: Tensor | None, bits: int, zero: int
) -> PackedWeight | None:
    """Whole numbers with a scale (and a minimum) for each group of inputs; None if no kernel takes them.

    Scales stay in float16 where that loses nothing.
    """
    n, k = codes_NK.shape
    group = k // scales_NG.shape[1]
    if not packable("BF16", n, k) or (group != 16 and group % BLOCK):
        return None
    packed_bits = 4 if bits <= 4 and group != 16 else 8
    packed_group = min(group, BLOCK)
    repeats = group // packed_group
    scales = scales_NG.float().repeat_interleave(repeats, 1)
    mins = None if mins_NG is None else mins_NG.float().repeat_interleave(repeats, 1)
    fits_half = _fits_half(scales) and (mins is None or _fits_half(mins))
    panels = -(-n // LANES)
    data = torch.empty(panels, k // BLOCK, LANES * BLOCK * packed_bits // 8, dtype=torch.uint8)
    scale_dtype = torch.float16 if fits_half else torch.float32
    packed_scales = torch.empty(panels, k // packed_group, LANES, dtype=scale_dtype)
    packed_mins = None if mins is None else torch.empty_like(packed_scales)
    packed = PackedWeight(data, packed_scales, packed_mins, n, k, packed_bits, packed_group, zero)
    _fill(packed, codes_NK, scales, mins)
    return packed


def _fits_half(values: Tensor) -> bool:
    return torch.equal(values.half().float(), values)


def _fill(packed: PackedWeight, q: Tensor, scales: Tensor, mins: Tensor | None) -> None:
    """`q` [n, k], `scales` and `mins` [n, groups], in any shape of as many values."""
    P, B, _ = packed.data.shape

    def lanes(values: Tensor, per_row: int) -> Tensor:
        """[n, per_row] as [P, 16, per_row], with zeros for outputs beyond n."""
        rows = values.reshape(packed.n, per_row)
        return F.pad(rows, (0, 0, 0, P * LANES - packed.n)).view(P, LANES, per_row)

    quads = lanes(q, packed.k).view(P, LANES, B, 8, 4).permute(0, 2, 3, 1, 4)[..., BYTE_ORDER]
    if packed.bits == 4:
        quads = quads[:, :, :4] | quads[:, :, 4:] << 4
    packed.data.copy_(quads.reshape(packed.data.shape))
    for target, values in ((packed.scales, scales), (packed.mins, mins)):
        if target is not None and values is not None:
            target.copy_(lanes(values, packed.k // packed.group).transpose(1, 2))


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
    return _form(first) == _form(second) and first.n % LANES == 0


def gateable(w: PackedWeight) -> bool:
    """Whether `linear_silu_mul` takes this weight."""
    return w.n % (2 * LANES) == 0


def concat(weights: list[PackedWeight], allocate: Callable[..., Tensor] = torch.empty) -> PackedWeight:
    """One weight with the outputs of all, in order, for fused projections. All need one form and whole panels."""
    first = weights[0]
    if any(_form(w) != _form(first) for w in weights):
        raise ConfigError("packed weights of different forms cannot be fused: keep them as separate layers")
    if any(w.n % LANES for w in weights[:-1]):
        raise ConfigError(f"packed weights can be fused only where outputs are multiples of {LANES}")

    def joined(parts: list[Tensor]) -> Tensor:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return torch.cat(parts, out=allocate(shape, dtype=parts[0].dtype))

    scales = [w.scales for w in weights if w.scales is not None]
    mins = [w.mins for w in weights if w.mins is not None]
    return replace(
        first,
        data=joined([w.data for w in weights]),
        scales=joined(scales) if scales else None,
        mins=joined(mins) if mins else None,
        n=sum(w.n for w in weights),
    )


def _form(w: PackedWeight) -> tuple:
    scale_dtype = None if w.scales is None else w.scales.dtype
    return w.k, w.bits, w.group, w.zero, w.mins is None, scale_dtype


# ---- product ----


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, k] in bf16 times the weight, plus a float32 bias: [T, n] in bf16 or float32."""
    y = F.linear(x, w.dense).to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


def linear_silu_mul(x: Tensor, w: PackedWeight) -> Tensor:
    """silu(gate) * up where gate and up are the halves of `linear(x, w)`: [T, n / 2] in bf16."""
    gate, up = linear(x, w).chunk(2, -1)
    return F.silu(gate) * up
