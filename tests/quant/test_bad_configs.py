"""Quantizations that a config describes wrongly: one sentence that names the key, never wrong numbers."""

import time

import pytest

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.quant._select import Globs, Modules, Targets, pattern
from quire.registry import load

SLOW = ("(a+)+b", "(a|a){50}b", "(a?){30}a{30}", r"(.*)\1", ".*.*.*.*.*x", "a?a?a?a?a?a?aaaaaa", "(?:a|.)" * 20 + "x")


@pytest.mark.parametrize("text", [*SLOW, "(", "[a", "x" * 301, 7, None])
def test_patterns_that_are_none_or_could_take_long_are_refused(text):
    with pytest.raises(BadModelFileError, match="ignore"):
        pattern(text, "ignore")


@pytest.mark.parametrize("text", [".*self_attn.(q|k|v|o)_proj$", r"model\.layers\.\d+\.mlp", ".*[.]7[.].*gate.*"])
def test_patterns_as_published_are_read(text):
    pattern(text, "targets")


MANY_SLOW = [f".*.*.*.*{i}" for i in range(20_000)]
MANY = {
    "ignore": ("compressed_tensors", {"config_groups": {}, "ignore": [f"re:{text}" for text in MANY_SLOW]}),
    "targets": (
        "compressed_tensors",
        {
            "format": "pack-quantized",
            "config_groups": {
                text: {"weights": {"num_bits": 4, "strategy": "channel"}, "targets": [f"re:{text}"]}
                for text in MANY_SLOW[:100]
            },
        },
    ),
    "modules_to_not_convert": ("awq", {"bits": 4, "group_size": 128, "modules_to_not_convert": MANY_SLOW}),
    "dynamic": ("gptq", {"bits": 4, "group_size": 128, "dynamic": {text: {} for text in MANY_SLOW}}),
    "extra_config": ("auto_round", {"bits": 4, "group_size": 128, "extra_config": {text: {} for text in MANY_SLOW}}),
    "exclude_modules": ("modelopt", {"quant_algo": "FP8", "exclude_modules": [f"*a*b*c*{i}" for i in range(20_000)]}),
    "types": ("gguf", {"types": dict.fromkeys(MANY_SLOW, "Q8_0")}),
}


@pytest.mark.parametrize("key", MANY)
def test_patterns_that_could_take_long_together_are_refused(key):
    name, settings = MANY[key]
    begun = time.perf_counter()
    with pytest.raises(BadModelFileError, match=f"{key} holds so many patterns"):
        load("quire.quant", name).quantization(settings)
    assert time.perf_counter() - begun < 5


def test_as_many_patterns_and_names_as_files_have_are_read():
    paths = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(256)]
    assert "model.layers.3.mlp.experts.7.up_proj" in Modules(paths, "key")
    assert "model.layers.3.mlp.experts.7.up_proj" in Globs(paths, "key")
    assert "model.layers.3.mlp.experts.700.up_proj" not in Globs(paths, "key")
    Targets([f"re:.*layers.{layer}.*{name}" for layer in range(60) for name in ("q_proj", "gate", "o_proj")], "key")
    dynamic = {rf"+:.*\.{layer}\..*{name}.*": {} for layer in range(60) for name in ("down", "up", "gate", "o_proj")}
    load("quire.quant", "gptq").quantization({"bits": 4, "group_size": 128, "dynamic": dynamic})


@pytest.mark.parametrize("kind", [Modules, Targets, Globs])
@pytest.mark.parametrize("value", ["lm_head", 7, [7], {"lm_head": 1}])
def test_lists_must_be_lists_of_names(kind, value):
    with pytest.raises(BadModelFileError, match="ignore is not a list"):
        kind(value, "ignore")


BASE = {"bits": 4, "group_size": 128}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
PER_TOKEN = {"strategy": "token", "dynamic": True}
CHANNELS = {"strategy": "channel"}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
POWERS = {**FLOAT4, "strategy": "group", "group_size": 32}


def scheme(form: object, weights: dict, activations: dict | None = None, **others: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"format": form, "config_groups": {"g": group}, **others}


def float8(weights: dict, activations: dict | None) -> tuple[str, dict, str]:
    return "compressed_tensors", scheme("float-quantized", FLOAT8 | weights, activations), "input_activations"


def extras(**others: object) -> tuple[str, dict, str]:
    return "compressed_tensors", {"config_groups": {}, **others}, next(iter(others))


def packed(form: str, weights: dict, says: str) -> tuple[str, dict, str]:
    return "compressed_tensors", scheme(f"{form}-quantized", weights), says


BAD = [
    ("gptq", {**BASE, "bits": 3}, "bits"),
    ("gptq", {**BASE, "bits": True}, "bits"),
    ("gptq", {**BASE, "group_size": 0}, "group_size"),
    ("gptq", {**BASE, "group_size": "128"}, "group_size"),
    ("gptq", {**BASE, "dynamic": [1]}, "dynamic"),
    ("gptq", {**BASE, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ("gptq", {**BASE, "format": "marlin"}, "format"),
    ("gptq", {**BASE, "format": "gptq", "checkpoint_format": "gptq_v2"}, "checkpoint_format .*format"),
    ("gptq", {**BASE, "rotation": "hadamard"}, "rotation"),
    ("gptq", {**BASE, "adapter": {"name": "lora", "rank": 64}}, "adapter"),
    ("gptq", {**BASE, "dynamic": {".*": {"adapter": {"name": "lora"}}}}, "adapter"),
    ("gptq", {**BASE, "pack_dtype": "int8"}, "pack_dtype"),
    ("gptq", {**BASE, "is_marlin_format": True}, "is_marlin_format"),
    ("gptq", {**BASE, "modules_in_block_to_quantize": "self_attn.q_proj"}, "modules_in_block_to_quantize"),
    ("gptq", {**BASE, "modules_in_block_to_quantize": [["self_attn.q_proj"], 7]}, "modules_in_block_to_quantize"),
    ("awq", {**BASE, "version": "gemv"}, "version"),
    ("awq", {**BASE, "checkpoint_format": "gemv_fast"}, "checkpoint_format"),
    ("awq", {**BASE, "format": "gemv_fast"}, "format"),
    ("awq", {**BASE, "group_size": -2}, "group_size"),
    ("fp8", {"activation_scheme": "sometimes"}, "activation_scheme"),
    ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [0, 128]}, "blocks of 128 x 128"),
    ("mxfp4", {"quant_method": "mxfp4", "bits": 8}, "bits"),
    ("mxfp4", {"quant_method": "mxfp4", "group_size": 16}, "group_size"),
    ("none", {"quant_method": "none", "bits": 4}, "bits"),
    ("int8", {"quant_method": "int8", "bits": 4, "group_size": 64}, "bits"),
    ("int4", {"quant_method": "int4", "group_size": 64}, "group_size"),
    ("compressed_tensors", {}, "config_groups"),
    ("compressed_tensors", {"config_groups": {"g": {}}}, "config_groups"),
    extras(sparsity_config={"format": "sparse-24"}),
    extras(sparsity_config="sparse"),
    extras(sparsity_config=["dense"]),
    extras(moe_sparsity_config={"x": 1}),
    extras(transform_config={"x": 1}),
    extras(transform_config=[1]),
    extras(transform_config={"format": "dense", "config_groups": {"R1": {"type": "hadamard"}}}),
    ("compressed_tensors", {"config_groups": {"g": {"weights": {}, "format": "marlin-24"}}}, "format"),
    ("compressed_tensors", scheme(["pack-quantized"], GROUPS), "format"),
    ("compressed_tensors", scheme({"pack-quantized": 1}, GROUPS), "format"),
    float8(CHANNELS, {**FLOAT8, **PER_TOKEN, "num_bits": 4}),
    float8(CHANNELS, {**INT8, **PER_TOKEN}),
    float8(CHANNELS, {**FLOAT8, **PER_TOKEN, "symmetric": False}),
    float8(CHANNELS, {**FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True}),
    float8(CHANNELS, {**FLOAT8, "strategy": "tensor", "dynamic": True}),
    float8(CHANNELS, {**FLOAT8, **PER_TOKEN, "dynamic": "local"}),
    float8(CHANNELS, {**FLOAT8, **PER_TOKEN, "dynamic": False}),
    float8(BLOCKS, {**FLOAT8, "strategy": "group", "group_size": 64, "dynamic": True}),
    float8(BLOCKS, {**FLOAT8, "strategy": "tensor", "dynamic": False}),
    packed("float", {**FLOAT8, **CHANNELS, "symmetric": False}, "weights.symmetric"),
    packed("float", {**INT8, **CHANNELS}, "weights.type"),
    packed("pack", {**GROUPS, "type": "float"}, "weights.type"),
    packed("pack", {**GROUPS, "dynamic": True}, "weights.dynamic"),
    packed("nvfp4-pack", {**FLOAT4, "num_bits": 8}, "weights.num_bits"),
    packed("nvfp4-pack", {**FLOAT4, "type": "int"}, "weights.type"),
    packed("nvfp4-pack", {**FLOAT4, "group_size": 32}, "weights.group_size"),
    packed("nvfp4-pack", {**FLOAT4, "strategy": "channel"}, "weights.strategy"),
    packed("mxfp4-pack", {**POWERS, "num_bits": 8}, "weights.num_bits"),
    packed("mxfp4-pack", {**POWERS, "group_size": 16}, "weights.group_size"),
    *(
        ("compressed_tensors", scheme("int-quantized", INT8 | CHANNELS, INT8 | PER_TOKEN | other), "input_activations")
        for other in ({"num_bits": 4}, {"type": "float"}, {"strategy": "tensor"}, {"symmetric": False})
    ),
    packed("int", {**INT8, **CHANNELS, "type": "float"}, "weights.type"),
    ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo"),
    ("modelopt", {"quant_algo": ["FP8"]}, "quant_algo"),
    ("modelopt", {"quant_algo": {}}, "quant_algo"),
    ("modelopt", {"quant_algo": "NVFP4", "group_size": 32}, "group_size"),
    ("modelopt", {"quant_algo": "NVFP4", "pre_quant_scale": True}, "pre_quant_scale"),
    ("bitsandbytes", {"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit"),
    ("bitsandbytes", {"load_in_4bit": "no"}, "load_in_4bit"),
    ("auto_round", {**BASE, "packing_format": "auto_round:marlin"}, "packing_format"),
    ("auto_round", {**BASE, "packing_format": "auto_round:auto_awq", "bits": 8}, "bits"),
    ("auto_round", {**BASE, "act_bits": 8}, "act_bits"),
    ("auto_round", {**BASE, "extra_config": {"lm_head": {"bits": 8, "data_type": "fp"}}}, "data_type"),
    ("auto_round", {**BASE, "rotation_config": {"block_size": 32}}, "rotation_config"),
    ("auto_round", {**BASE, "super_bits": 6, "super_group_size": 8}, "super_bits"),
    ("auto_round", {**BASE, "super_group_size": 8}, "super_group_size"),
    ("auto_round", {**BASE, "quant_lm_head": "yes"}, "quant_lm_head"),
    ("auto_round", {**BASE, "block_name_to_quantize": {"model.layers": 1}}, "block_name_to_quantize"),
]


@pytest.mark.parametrize(("name", "settings", "says"), BAD)
def test_a_config_that_cannot_be_honoured_is_refused_by_its_key(name, settings, says):
    with pytest.raises((BadModelFileError, UnsupportedModelError), match=says):
        load("quire.quant", name).quantization(settings)


ACTIVATIONS = {"observer": "minmax", "observer_kwargs": {}, "group_size": None, "actorder": None, "zp_dtype": None}
GOOD = [
    ("gptq", {**BASE, "rotation": None, "adapter": None, "format": "gptq", "checkpoint_format": "gptq"}),
    ("gptq", {**BASE, "dynamic": None, "damp_percent": 0.1, "static_groups": False, "meta": {"mse": 2.0}, "sym": True}),
    ("gptq", {**BASE, "pack_dtype": "int32", "is_marlin_format": False, "modules_in_block_to_quantize": None}),
    ("awq", {**BASE, "version": "GEMM", "checkpoint_format": "gemm", "format": "gemm", "zero_point": True}),
    ("awq", {**BASE, "version": "gemm", "backend": "autoawq", "modules_to_not_convert": None, "exllama_config": None}),
    ("auto_round", {**BASE, "data_type": "int", "act_bits": 16, "rotation_config": None, "super_bits": None}),
    ("auto_round", {**BASE, "data_type": "int", "act_bits": None, "rotation_config": {}, "quant_lm_head": False}),
    ("auto_round", {**BASE, "extra_config": {"model.gate": {"bits": 16, "data_type": "fp"}}, "nsamples": 512}),
    ("fp8", {"activation_scheme": "dynamic", "ignored_layers": None, "weight_block_size": [128, 128]}),
    ("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": False}),
    ("none", {"quant_method": "none"}),
    ("int4", {"quant_method": "int4"}),
    ("modelopt", {"quant_algo": "NVFP4", "group_size": 16, "has_zero_point": False, "pre_quant_scale": False}),
    ("modelopt", {"quant_algo": "FP8", "group_size": None, "kv_cache_quant_algo": None, "exclude_modules": None}),
    ("compressed_tensors", scheme("pack-quantized", GROUPS, sparsity_config={}, transform_config={}, version="0.9")),
    (
        "compressed_tensors",
        scheme("pack-quantized", GROUPS, sparsity_config={"format": "dense", "global_sparsity": 0.1, "targets": []}),
    ),
    (
        "compressed_tensors",
        scheme("pack-quantized", GROUPS, sparsity_config=None, transform_config={"config_groups": {}}),
    ),
    ("compressed_tensors", scheme("pack-quantized", {**GROUPS, "observer": "mse", "dynamic": False, "actorder": None})),
    ("compressed_tensors", scheme("float-quantized", FLOAT8 | CHANNELS, FLOAT8 | PER_TOKEN | ACTIVATIONS)),
    (
        "compressed_tensors",
        scheme("float-quantized", FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "tensor", "dynamic": False}),
    ),
    ("compressed_tensors", scheme("naive-quantized", FLOAT8 | CHANNELS, None, quantization_status="frozen")),
    ("compressed_tensors", scheme("int-quantized", INT8 | CHANNELS, INT8 | PER_TOKEN | ACTIVATIONS)),
    ("compressed_tensors", scheme("naive-quantized", INT8 | CHANNELS, INT8 | PER_TOKEN)),
    (
        "compressed_tensors",
        scheme(
            "nvfp4-pack-quantized", {**FLOAT4, "scale_dtype": "torch.float8_e4m3fn"}, {**FLOAT4, "dynamic": "local"}
        ),
    ),
    ("compressed_tensors", scheme("nvfp4-pack-quantized", {**FLOAT4, "strategy": "group", "group_size": None})),
    ("compressed_tensors", scheme("mxfp4-pack-quantized", {**POWERS, "zp_dtype": "torch.uint8"}, POWERS)),
]


@pytest.mark.parametrize(("name", "settings"), GOOD)
def test_defaults_and_what_tells_how_a_file_was_made_are_read(name, settings):
    load("quire.quant", name).quantization(settings)
