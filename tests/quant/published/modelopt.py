"""Checkpoints with quant_method "modelopt", as NVIDIA publishes them.

The oracle is nvidia-modelopt: it calibrates with one batch of random tokens, exports a folder, and reads the weights
back in float32; its quantizers round inputs to FP8. It rounds them to FP4 too, which we do not, on purpose. Older
checkpoints lack quantization_config in config.json and have hf_quant_config.json only.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.quant.published.common import SIZES, Published, linears, weights


def exported(sizes: Mapping[str, Any], settings: Any, skipped: str | None, folder: Path) -> None:
    """Writes a checkpoint. `settings`: how mtq.quantize shall; `skipped`: a pattern of modules that it shall not."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in sizes.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes["model_type"], **fields)).to(torch.bfloat16)
    model.load_state_dict(weights(sizes))
    tokens = torch.randint(0, sizes["vocab_size"], (4, 64), generator=torch.Generator().manual_seed(0))
    model = mtq.quantize(model, settings, lambda model: model(tokens))
    if skipped is not None:
        mtq.disable_quantizer(model, skipped)
    export_hf_checkpoint(model, export_dir=folder)


def value_of(path: str, tensors: Mapping[str, Tensor]) -> Tensor:
    from modelopt.torch.export.quant_utils import QUANTIZATION_FP8, from_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight, scale = (tensors[f"{path}.{name}"] for name in ("weight", "weight_scale"))
    if weight.dtype != torch.uint8:
        return from_quantized_weight(weight, scale, QUANTIZATION_FP8, torch.float32)
    shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
    whole = tensors[f"{path}.weight_scale_2"]
    packed = NVFP4QTensor(shape, torch.float32, weight)
    return packed.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})


def layer(weight: Tensor, input_scale: Tensor, x: Tensor) -> Tensor:
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    rounded = TensorQuantizer(QuantizerAttributeConfig(num_bits=(4, 3)), amax=input_scale * 448)(x)
    return rounded @ weight.T


def published(
    kind: str, sizes: Mapping[str, Any] = SIZES, skipped: str | None = None, with_cache: bool = False
) -> Published:
    """`kind`: the library's name of a config; `with_cache`: the KV cache is quantized to FP8 too."""
    import modelopt.torch.quantization as mtq

    settings = getattr(mtq, kind)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        if with_cache:
            settings = mtq.update_quant_cfg_with_kv_cache_quant(settings, mtq.FP8_KV_CFG["quant_cfg"])
        folder = Path(name)
        exported(sizes, settings, skipped, folder)
        tensors = load_file(folder / "model.safetensors")
        config, quantization = (json.loads((folder / f).read_text()) for f in ("config.json", "hf_quant_config.json"))
    quantized = [path for path in linears(tensors) if f"{path}.weight_scale" in tensors]
    values = {path: value_of(path, tensors) for path in quantized}
    layers = {
        path: partial(layer, weight, tensors[f"{path}.input_scale"])
        for path, weight in values.items()
        if tensors[f"{path}.weight"].dtype == torch.float8_e4m3fn
    }
    return Published(config, tensors, values, {"hf_quant_config.json": quantization}, layers)


def older() -> Published:
    found = published("FP8_DEFAULT_CFG")
    return replace(found, config={name: part for name, part in found.config.items() if name != "quantization_config"})


CASES = {
    "modelopt fp8": partial(published, "FP8_DEFAULT_CFG"),
    "modelopt fp8, only hf_quant_config.json": older,
    "modelopt fp8, cache in fp8": partial(published, "FP8_DEFAULT_CFG", with_cache=True),
    "modelopt nvfp4": partial(published, "NVFP4_DEFAULT_CFG"),
    "modelopt nvfp4, attention of layer 1 plain": partial(
        published, "NVFP4_DEFAULT_CFG", skipped="*layers.1.self_attn*"
    ),
}
