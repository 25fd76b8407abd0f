"""Checkpoints with quant_method "bitsandbytes", as transformers saves them.

The oracle is bitsandbytes on the CPU: its modules quantize and name the tensors, its functions dequantize. It
dequantizes four bits to the dtype that the weight had, here bfloat16; it is told float32 instead, for exact products.
Its own layer of four bits is run; the one of int8 rounds inputs, which we do not, on purpose.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.quant.published.common import SIZES, Published, linears, weights


def quantized(weight: Tensor, settings: Any) -> torch.nn.Linear:
    """The library's own layer with this weight. What its `state_dict` holds is what a checkpoint has of it."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    outputs, inputs = weight.shape
    if settings.load_in_8bit:
        linear = Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
        linear.weight = Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
    else:
        kind = settings.bnb_4bit_quant_type
        nested = settings.bnb_4bit_use_double_quant
        linear = Linear4bit(inputs, outputs, bias=False, quant_type=kind, compress_statistics=nested)
        linear.weight = Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=nested)
    return linear.to("cpu")


def value_of(state: Mapping[str, Tensor]) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_dequant

    if "SCB" in state:
        return int8_vectorwise_dequant(state["weight"], state["SCB"])
    parts = {name.removeprefix("weight."): tensor for name, tensor in state.items() if name != "weight"}
    quant_state = QuantState.from_dict(parts, torch.device("cpu"))
    rounded = dequantize_4bit(state["weight"], quant_state)
    quant_state.dtype = torch.float32
    value = dequantize_4bit(state["weight"], quant_state)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, value.bfloat16())
    return value


def published(sizes: Mapping[str, Any] = SIZES, skipped: list[str] | None = None, **options: Any) -> Published:
    """`skipped`: what is not quantized; None: the head."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizers_utils import should_convert_module

    settings = BitsAndBytesConfig(llm_int8_skip_modules=skipped, **options)
    tensors = weights(sizes)
    values, layers = {}, {}
    for path in linears(tensors):
        if not should_convert_module(path, skipped):
            continue
        linear = quantized(tensors.pop(f"{path}.weight"), settings)
        state = linear.state_dict()
        values[path] = value_of(state)
        if settings.load_in_4bit:
            layers[path] = linear
        tensors |= {f"{path}.{name}": tensor for name, tensor in state.items()}
    return Published({**sizes, "quantization_config": settings.to_dict()}, tensors, values, layers=layers)


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
SKIPPED = ["lm_head", "v_proj", "model.layers.1.mlp.up_proj"]

CASES = {
    "bnb nf4": partial(published, bnb_4bit_quant_type="nf4", **FOUR_BITS),
    "bnb fp4": partial(published, bnb_4bit_quant_type="fp4", **FOUR_BITS),
    "bnb nf4, nested": partial(
        published, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, skipped=SKIPPED, **FOUR_BITS
    ),
    "bnb int8": partial(published, load_in_8bit=True),
}
