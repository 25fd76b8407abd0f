"""Checkpoints with quant_method "compressed-tensors", as LLM Compressor publishes them.

The oracle is the compressed-tensors library: its presets are the schemes, it decides which modules a config means, it
computes scales, packs, writes the quantization_config, and unpacks. Scales are bfloat16, the model's dtype. It
dequantizes in the dtype of the scales (NVFP4 and MXFP4: to bfloat16), which rounds; here it is given the same scales
in float32, so that the values are exact products. `check` compares them with what it makes of the tensors as they are.
Its own layers round inputs, except to FP4: we compute with FP4 weights and inputs of 16 bits, on purpose.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.quant.published.common import PARTIAL, SIZES, Published, weights

LINEAR = ["Linear"]


def schemes(config: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """path -> scheme, for the modules that a config quantizes."""
    from compressed_tensors.quantization import apply_quantization_config
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in sizes.items() if name not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes["model_type"], **fields))
        apply_quantization_config(model, config, show_progress=False)
    modules = {path: getattr(module, "quantization_scheme", None) for path, module in model.named_modules()}
    return {path: scheme for path, scheme in modules.items() if scheme is not None}


def calibrated(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """A weight with its scales and zero points: the smallest range that has all values in it."""
    from compressed_tensors.quantization import QuantizationStrategy
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant

    found = {"weight": weight}
    strategy = QuantizationStrategy(args.strategy).value
    match strategy:
        case "tensor":
            low, high = weight.aminmax()
        case "channel":
            low, high = weight.aminmax(dim=1, keepdim=True)
        case "group" | "tensor_group":
            low, high = weight.unflatten(1, (-1, args.group_size)).aminmax(dim=2)
        case "block":
            rows, columns = args.block_structure
            padded = maybe_pad_tensor_for_block_quant(weight, (rows, columns))
            cut = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            low, high = cut.amin((1, 3)), cut.amax((1, 3))
    if strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(*weight.aminmax())
    scale, zero_point = calculate_qparams(low, high, args, found.get("weight_global_scale"))
    return found | {"weight_scale": scale, "weight_zero_point": zero_point}


def activation_scales(args: Any, place: int) -> dict[str, Tensor]:
    """What a checkpoint has for a linear's inputs, with invented numbers."""
    if args is None or args.dynamic is True:
        return {}
    if args.dynamic:
        return {"input_global_scale": torch.tensor([400.0 + place])}
    return {"input_scale": torch.tensor([0.02 + 0.001 * place], dtype=torch.bfloat16)}


def exact(made: Mapping[str, Tensor], scheme: Any) -> Tensor:
    """The weight in float32 of the tensors of one linear."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    scale = made["weight_scale"]
    if scheme.weights.num_bits == 4 and scheme.weights.type == "float":
        packed = made["weight_packed"]
        weight = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
        scale = compressor._decompress_scale(scale, torch.float32)
        return dequantize(weight, scale, args=scheme.weights, global_scale=made.get("weight_global_scale"))
    return compressor.decompress({**made, "weight_scale": scale.float()}, scheme)["weight"]


def check(made: Mapping[str, Tensor], scheme: Any, weight: Tensor) -> None:
    """What the library itself makes of the tensors is the same, but for its dtype."""
    from compressed_tensors.compressors import BaseCompressor

    theirs = BaseCompressor.get_value_from_registry(scheme.format.value).decompress(dict(made), scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs, weight.to(torch.bfloat16))


def layer(scheme: Any, weight: Tensor, input_scale: Tensor | None, x: Tensor) -> Tensor:
    """What the library's own layer makes of inputs. It wants batches, and whole groups: zeros fill them up."""
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized

    filling = (0, -weight.shape[1] % (scheme.input_activations.group_size or 1))
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(functional.pad(weight, filling), requires_grad=False)
    linear.quantization_scheme = scheme
    linear.quantization_status = QuantizationStatus.COMPRESSED
    if input_scale is not None:
        linear.input_scale = torch.nn.Parameter(input_scale.float(), requires_grad=False)
    set_forward_quantized(linear)
    return linear(functional.pad(x, filling)[None])[0]


def published(
    groups: Mapping[str, tuple[str, list[str], dict[str, Any]]],
    sizes: Mapping[str, Any] = SIZES,
    ignore: tuple[str, ...] = ("lm_head",),
    change: Callable[[str, Tensor], Tensor] = lambda path, weight: weight,
) -> Published:
    """`groups`: name -> (a preset of the library, its targets, what is different in the weights' part of it).

    `change`: makes other weights of the usual ones.
    """
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationStatus,
        preset_name_to_scheme,
    )

    config = QuantizationConfig(config_groups={}, ignore=list(ignore))
    for name, (preset, targets, different) in groups.items():
        scheme = preset_name_to_scheme(preset, targets)
        if different:
            scheme.weights = QuantizationArgs(**{**scheme.weights.model_dump(), **different})
        scheme.format = infer_module_format(torch.nn.Linear, scheme)
        config.config_groups[name] = scheme
    formats = {scheme.format.value for scheme in config.config_groups.values()}
    config.format = formats.pop() if len(formats) == 1 else "mixed-precision"
    tensors = weights(sizes)
    values, layers = {}, {}
    for path, scheme in schemes(config, sizes).items():
        state = calibrated(change(path, tensors.pop(f"{path}.weight")), scheme.weights)
        state |= activation_scales(scheme.input_activations, len(values))
        made = BaseCompressor.get_value_from_registry(scheme.format.value).compress(state, scheme)
        values[path] = exact(made, scheme)
        check(made, scheme, values[path])
        if scheme.input_activations is not None and scheme.input_activations.num_bits > 4:
            layers[path] = partial(layer, scheme, values[path], made.get("input_scale"))
        tensors |= {f"{path}.{name}": tensor for name, tensor in made.items()}
    config.quantization_status = QuantizationStatus.COMPRESSED
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        ModelCompressor(config).update_config(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
    return Published(written, tensors, values, layers=layers)


def unlike(path: str, weight: Tensor) -> Tensor:
    """q, k and v of very different sizes, so that their scales differ."""
    return weight * {"q_proj": 1, "k_proj": 4, "v_proj": 0.25}.get(path.rpartition(".")[2], 1)


def shifted(path: str, weight: Tensor) -> Tensor:
    """Rows with other means, so that zero points differ from row to row."""
    return weight + torch.linspace(-0.15, 0.15, len(weight), dtype=weight.dtype)[:, None]


def ordered() -> Published:
    """actorder "group": weight_g_idx says which group of scales an input is in.

    Version 0.20 of the library refuses such checkpoints, of which there are many. Here it packs and unpacks weights
    with their inputs in the order of groups; this function only changes the order, as its older versions did.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    generator = torch.Generator().manual_seed(1)
    usual = published({"group_0": ("W4A16", LINEAR, {})})
    tensors = dict(usual.tensors)
    values = {}
    for path, weight in usual.values.items():
        order = torch.randperm(weight.shape[1], generator=generator)  # group by group, which input it is
        place = order.argsort()
        numbers = unpack_from_int32(tensors[f"{path}.weight_packed"], 4, weight.shape)
        tensors[f"{path}.weight_packed"] = pack_to_int32(numbers[:, place], 4)
        tensors[f"{path}.weight_g_idx"] = (place // 128).int()
        values[path] = weight[:, place]
    config = json.loads(json.dumps(usual.config))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return Published(config, tensors, values)


def older() -> Published:
    """A config as of 2024: groups do not say their format, empty settings are spelled out, the status is "frozen"."""
    found = published({"group_0": ("FP8", LINEAR, {})})
    config = json.loads(json.dumps(found.config))
    quantization = config["quantization_config"]
    for name in ("version", "transform_config", "sparsity_config", "moe_sparsity_config"):
        del quantization[name]
    group = quantization["config_groups"]["group_0"]
    del group["format"]
    for part in ("input_activations", "weights"):
        group[part] |= {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
    quantization |= {"quantization_status": "frozen", "global_compression_ratio": 1.5}
    return replace(found, config=config)


def one(preset: str, sizes: Mapping[str, Any] = SIZES, different: dict[str, Any] = {}, **options: Any) -> Callable:
    """A case with the same scheme for every linear but the head."""
    return partial(published, {"group_0": (preset, LINEAR, different)}, sizes, **options)


CASES = {
    "ct fp8 per tensor": one("FP8"),
    "ct fp8 per tensor, unlike q k v": one("FP8", change=unlike),
    "ct fp8 per tensor, older config": older,
    "ct fp8 per channel": one("FP8_DYNAMIC"),
    "ct fp8 blocks": one("FP8_BLOCK"),
    "ct fp8 partial blocks": one("FP8_BLOCK", PARTIAL),
    "ct int8 per channel": one("W8A8"),
    "ct w4a16 groups": one("W4A16"),
    "ct w4a16 asymmetric": one("W4A16_ASYM", change=shifted),
    "ct w4a16 ordered, scales in order": one("W4A16", different={"actorder": "weight"}),
    "ct w4a16 ordered by group": ordered,
    "ct w8a16 per channel": one("W8A16", different={"strategy": "channel", "group_size": None}),
    "ct nvfp4 weights": one("NVFP4A16"),
    "ct nvfp4": one("NVFP4"),
    "ct mxfp4 weights": one("MXFP4A16"),
    "ct mxfp4": one("MXFP4"),
    "ct mixed": partial(
        published,
        {
            "group_0": ("W4A16", ["re:.*(q|k|v|o|gate|up)_proj$"], {}),
            "group_1": ("FP8_DYNAMIC", ["re:.*down_proj"], {}),
        },
        ignore=("lm_head", r"re:.*layers\.1\.self_attn\.[ko]_proj", "model.layers.0.mlp.up_proj"),
    ),
}
