"""compressed-tensors, as LLM Compressor writes it: a scheme per group of layers, in one of a few formats."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.ops.packed_linear.forms import Affine, Form, Table4
from quire.quant._checked import checked_scales, finite, positive_scale
from quire.quant._dummy import E2M1_EXPONENT, E2M1_SCALE, signed_scales, whole_scale, word
from quire.quant._select import Targets, check, choice, group_size, names, objects
from quire.quant.base import INPUTS_STAY, Choice, Fill, MethodMaker, Part, Reader, Stored, say_once
from quire.quant.fp8 import SCALES, Blocks, Scaled
from quire.quant.gptq import HALVES, ORDERED, affine, fields, group_order, stored_order
from quire.quant.mxfp4 import nibbles

# What a config may say of weights or activations, by how they are kept.
FLOAT8 = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}
INT8 = {"num_bits": (8,), "type": ("int",), "symmetric": (True,)}
FLOAT4 = {
    "num_bits": (4,), "type": ("float",), "symmetric": (True,), "dynamic": (False,),
    "strategy": ("tensor_group", "group"),
}  # fmt: skip
WEIGHTS, INPUTS = "weights.", "input_activations."


@dataclass(frozen=True)
class Int8(Reader):
    """A scale per output; activations are rounded with a scale per token."""

    form = Affine

    def stored(self, part: Part) -> Iterable[Stored]:
        yield Stored(".weight", part.shape, ("I8",), is_codes=True)
        yield Stored(".weight_scale", (part.shape[0], 1), HALVES, ("outputs", None), fill=whole_scale(8))

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes = tensors[".weight"].view(torch.uint8) ^ 128
        return Affine(codes, finite(part, tensors, ".weight_scale"), 8, zero=128, rounds="int8 token")


@dataclass(frozen=True)
class Packed(Reader):
    """Whole numbers in 32-bit words along the inputs, stored as if without a sign."""

    bits: int
    group: int  # inputs; 0: all of them
    symmetric: bool
    has_order: bool
    form = Affine

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        per_word = 32 // self.bits
        group = self.group or k
        if k % group or k % per_word:
            raise UnsupportedModelError(f"{part.path} has {k} inputs, which groups of {group} do not divide")
        num_groups = k // group
        axes = ("outputs", None if num_groups == 1 else "inputs")
        yield Stored(".weight_packed", (n, k // per_word), ("I32",), is_codes=True)
        yield Stored(".weight_scale", (n, num_groups), HALVES, axes, fill=self._dummy_scales(n))
        check_shape = partial(_check_shape, part)
        yield Stored(".weight_shape", (2,), ("I64",), (None,), unused=True, check=check_shape)
        if not self.symmetric:
            middle = 2 ** (self.bits - 1)
            zeros = word(self.bits, middle - 1, middle)  # not all the same
            yield Stored(".weight_zero_point", (-(-n // per_word), num_groups), ("I32",), axes, fill=zeros)
        yield stored_order(part, ".weight_g_idx", group, self.has_order)

    def undivided(self, part: Part) -> str:
        return ORDERED if self.has_order and 0 < self.group < part.shape[-1] else ""

    def _dummy_scales(self, num_outputs: int) -> Fill:
        if self.symmetric:
            return lambda: signed_scales(self.bits, num_outputs)[:, None]
        return whole_scale(self.bits)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        codes_NK = fields(tensors[".weight_packed"], self.bits).flatten(1)
        scales_NG = finite(part, tensors, ".weight_scale")
        order_K = None
        if self.has_order:
            order_K = group_order(part, tensors, ".weight_g_idx", scales_NG.shape[1])
            codes_NK = codes_NK if order_K is None else codes_NK[:, order_K.long()].contiguous()
        if self.symmetric:
            return Affine(codes_NK, scales_NG, self.bits, 2 ** (self.bits - 1), None, order_K)
        zeros_GN = fields(tensors[".weight_zero_point"].T, self.bits).flatten(1)[:, : len(codes_NK)]
        return affine(codes_NK, scales_NG, zeros_GN.T, self.bits, order_K)


@dataclass(frozen=True)
class Nvfp4(Reader):
    """Four-bit floats with a float8 scale for each 16, and one scale of the whole that divides these."""

    has_input_scale: bool
    form = Table4

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        if k % 16:
            raise UnsupportedModelError(f"{part.path} has {k} inputs, which groups of 16 do not divide")
        yield Stored(".weight_packed", (n, k // 2), ("U8",), is_codes=True)
        yield Stored(".weight_scale", (n, k // 16), ("F8_E4M3",), fill=1.0)
        yield Stored(".weight_global_scale", (1,), SCALES, (None,), fill=1 / E2M1_SCALE)
        if self.has_input_scale:
            yield Stored(".input_global_scale", (1,), SCALES, (None,), unused=True)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        divisor = positive_scale(part, tensors, ".weight_global_scale")
        checked_scales(part, tensors, ".weight_scale")
        scales_NG = tensors[".weight_scale"]
        outer_N = (1 / divisor).repeat(len(scales_NG))
        return Table4(nibbles(tensors[".weight_packed"]), scales_NG, outer_N=outer_N)


@dataclass(frozen=True)
class Mxfp4(Reader):
    """Four-bit floats with a power of two for each 32."""

    form = Table4

    def stored(self, part: Part) -> Iterable[Stored]:
        n, k = part.shape[-2:]
        if k % 32:
            raise UnsupportedModelError(f"{part.path} has {k} inputs, which groups of 32 do not divide")
        yield Stored(".weight_packed", (n, k // 2), ("U8",), is_codes=True)
        yield Stored(".weight_scale", (n, k // 32), ("U8", "F8_E8M0"), fill=E2M1_EXPONENT)

    def read(self, part: Part, tensors: dict[str, Tensor]) -> Form:
        checked_scales(part, tensors, ".weight_scale")
        return Table4(nibbles(tensors[".weight_packed"]), tensors[".weight_scale"])


def _check_shape(part: Part, shape: Tensor) -> None:
    if shape.tolist() != list(part.shape):
        raise BadModelFileError(
            f"{part.path}.weight_shape is {shape.tolist()}, and the model has {list(part.shape)} there"
        )


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    _refuse_extras(settings)
    ignored = Targets(settings.get("ignore"), "ignore")
    groups = objects(settings, "config_groups")
    if settings.get("config_groups") is None:
        raise BadModelFileError("quantization_config has no config_groups")
    Targets([name for group in groups.values() for name in names(group.get("targets"), "targets")], "targets")
    schemes = [(Targets(group.get("targets"), "targets"), _reader(group, settings)) for group in groups.values()]

    def find(path: str, ways: Choice) -> MethodMaker:
        if ways.is_table or path in ignored or ignored.all_linear:
            return ways.plain
        # A layer's own name counts before its class.
        for is_fitting in (lambda targets: path in targets, lambda targets: targets.all_linear):
            for targets, reader in schemes:
                if is_fitting(targets):
                    return ways.read_by(reader)
        return ways.plain

    return find


def _refuse_extras(settings: dict[str, Any]) -> None:
    """What would change weights further; empty objects, and the format "dense", say that nothing does."""
    for key in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        extra = settings.get(key) or {}
        if not isinstance(extra, dict):
            raise BadModelFileError(f"quantization_config gives {key} as something else than an object")
        is_dense = extra.get("format") == "dense" and not extra.get("config_groups")
        if any(extra.values()) and not is_dense:
            raise UnsupportedModelError(f"quantization_config has {key}, which is not supported")


def _reader(group: dict[str, Any], settings: dict[str, Any]) -> Reader:
    weights = group.get("weights")
    activations = group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(activations, dict | None):
        raise BadModelFileError("quantization_config: a group of config_groups lacks its weights' arguments")
    if group.get("output_activations") is not None:
        raise UnsupportedModelError("quantization_config has output_activations: rounded outputs are not supported")
    form = group.get("format") or settings.get("format")
    makers: dict[str, Callable[[dict[str, Any], dict[str, Any] | None], Reader]] = {
        "float-quantized": _float8,
        "naive-quantized": _int8 if weights.get("type", "int") == "int" else _float8,
        "int-quantized": _int8,
        "pack-quantized": _packed,
        "nvfp4-pack-quantized": _nvfp4,
        "mxfp4-pack-quantized": _mxfp4,
    }
    if not isinstance(form, str) or form not in makers:
        raise UnsupportedModelError(f"quantization_config has the format {form!r:.60}, which is not supported")
    return makers[form](weights, activations)


def _float8(weights: dict[str, Any], activations: dict[str, Any] | None) -> Reader:
    check(weights, FLOAT8, WEIGHTS)
    strategy = choice(weights, "strategy", ("tensor", "channel", "block"), owner=WEIGHTS)
    has_static_inputs = False
    if activations is not None:
        check(activations, FLOAT8, INPUTS)
        dynamic = (True,) if strategy == "block" else (True, False, None)
        has_static_inputs = not choice(activations, "dynamic", dynamic, owner=INPUTS)
        inputs = "tensor" if has_static_inputs else "group" if strategy == "block" else "token"
        check(activations, {"strategy": (inputs,)}, INPUTS)
    if strategy == "block":
        check(activations or {}, {"group_size": (128,)}, INPUTS)
        if weights.get("block_structure") != [128, 128]:
            raise BadModelFileError("quantization_config: blocks of 128 x 128 can be read, no others")
        return Blocks((128, 128), ".weight_scale", rounds=activations is not None)
    shapes = "one" if strategy == "tensor" else "outputs"
    return Scaled(".weight_scale", shapes, ".input_scale" if has_static_inputs else None, activations is not None)


def _int8(weights: dict[str, Any], activations: dict[str, Any] | None) -> Reader:
    check(weights, INT8, WEIGHTS)
    choice(weights, "strategy", ("channel",), owner=WEIGHTS)
    if activations is None:
        raise UnsupportedModelError(
            "quantization_config has no input_activations for int8 weights: a scale per token is needed"
        )
    check(activations, {**INT8, "strategy": ("token",)}, INPUTS)
    choice(activations, "dynamic", (True,), owner=INPUTS)
    return Int8()


def _nvfp4(weights: dict[str, Any], activations: dict[str, Any] | None) -> Reader:
    check(weights, {**FLOAT4, "group_size": (16,)}, WEIGHTS)
    _say_inputs_stay(activations)
    return Nvfp4(activations is not None)


def _mxfp4(weights: dict[str, Any], activations: dict[str, Any] | None) -> Reader:
    check(weights, {**FLOAT4, "group_size": (32,)}, WEIGHTS)
    _say_inputs_stay(activations)
    return Mxfp4()


def _say_inputs_stay(activations: dict[str, Any] | None) -> None:
    if activations is not None:
        say_once(INPUTS_STAY)


def _packed(weights: dict[str, Any], activations: dict[str, Any] | None) -> Reader:
    if activations is not None:
        raise UnsupportedModelError("quantization_config: rounded activations are not supported with packed weights")
    check(weights, {"type": ("int",), "dynamic": (False,)}, WEIGHTS)
    bits = choice(weights, "num_bits", (2, 4, 8), owner=WEIGHTS)
    strategy = choice(weights, "strategy", ("group", "channel"), owner=WEIGHTS)
    group = group_size(weights) if strategy == "group" else 0
    order = choice(weights, "actorder", (None, False, True, "group", "dynamic", "weight", "static"))
    symmetric = choice(weights, "symmetric", (True, False), True)
    return Packed(bits, group, symmetric, order in (True, "group", "dynamic"))
