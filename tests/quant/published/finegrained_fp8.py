"""Checkpoints with quant_method "fp8", as Qwen3-FP8, DeepSeek-V3 and Ministral 3 publish them.

The oracle is transformers: Fp8Quantize makes the tensors, and the function that its backward pass dequantizes with
reads them, as Fp8Dequantize refuses blocks that are not whole. Both compute in float32. Fp8Quantize leaves a weight
plain where blocks are not whole; such a weight is filled up with zeros for it, and what it makes is cut to size.

Transformers rounds inputs in kernels for GPUs only; the layers of compressed-tensors follow the same rule in torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.quant.published import compressed
from tests.quant.published.common import PARTIAL, SIZES, Published, linears, weights

BLOCK = [128, 128]
NOT_QUANTIZED = ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj")


def quantize(weight: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
    """(weight in FP8, weight_scale_inv)."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    outputs, inputs = weight.shape
    rows, columns = settings.weight_block_size or weight.shape
    padded = functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    made = Fp8Quantize(FineGrainedFP8HfQuantizer(settings)).convert({"linear.weight": padded})
    return made["linear.weight"][:outputs, :inputs], made["linear.weight_scale_inv"]


def layer(weight: Tensor, input_scale: Tensor | None, x: Tensor) -> Tensor:
    """Inputs rounded with a scale for each 128, or with the checkpoint's."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme("FP8_BLOCK" if input_scale is None else "FP8", compressed.LINEAR)
    return compressed.layer(scheme, weight, input_scale, x)


def published(
    sizes: Mapping[str, Any],
    quantization: dict[str, Any],
    stored: Callable[[Tensor], Tensor] = lambda scale: scale,
) -> Published:
    """`stored`: makes the tensor that the checkpoint has of the scales that the library makes."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
    from transformers.quantizers.quantizers_utils import should_convert_module

    settings = FineGrainedFP8Config(**quantization)
    tensors = weights(sizes)
    values, layers = {}, {}
    for path in linears(tensors):
        if not should_convert_module(path, settings.modules_to_not_convert):
            continue
        weight, scale = quantize(tensors[f"{path}.weight"], settings)
        if settings.weight_block_size is None:
            scale = scale.reshape(())
            tensors[f"{path}.activation_scale"] = torch.tensor(0.02 + 0.001 * len(values), dtype=scale.dtype)
        values[path] = _dequantize_fp8_weight(weight, scale, settings.weight_block_size, torch.float32)
        layers[path] = partial(layer, values[path], tensors.get(f"{path}.activation_scale"))
        tensors |= {f"{path}.weight": weight, f"{path}.weight_scale_inv": stored(scale)}
    return Published({**sizes, "quantization_config": quantization}, tensors, values, layers=layers)


def blocks() -> Published:
    """As Qwen3-FP8: the list of what is not quantized names norms too."""
    layers = range(SIZES["num_hidden_layers"])
    norms = [f"model.layers.{i}.{name}" for i in layers for name in ("input_layernorm", "post_attention_layernorm")]
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": BLOCK,
        "modules_to_not_convert": ["lm_head", *norms, *NOT_QUANTIZED],
    }  # fmt: skip
    return published(SIZES, quantization)


def partial_blocks() -> Published:
    """As DeepSeek-V3: no list of what is not quantized, although the head is not."""
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": BLOCK,
    }  # fmt: skip
    return published(PARTIAL, quantization)


POWERS = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": BLOCK,
}  # fmt: skip


def powers_of_two() -> Published:
    """Scales of one byte (float8_e8m0fnu), as transformers wants them where scale_fmt is "ue8m0"."""
    return published(SIZES, POWERS)


def powers_of_two_as_floats() -> Published:
    """As DeepSeek-V3.1: scale_fmt says "ue8m0", and the scales are powers of two, but stored in float32."""
    return published(SIZES, POWERS, stored=lambda scale: scale.float())


def per_tensor() -> Published:
    """As Ministral 3: one scale for a weight and one for its inputs, both without dimensions."""
    quantization = {
        "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return published(SIZES, quantization)


CASES = {
    "fp8 blocks": blocks,
    "fp8 partial blocks": partial_blocks,
    "fp8 blocks, scales in e8m0": powers_of_two,
    "fp8 blocks, powers of two in float32": powers_of_two_as_floats,
    "fp8 per tensor": per_tensor,
}
