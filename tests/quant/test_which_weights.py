"""Which weights a config means: those that it leaves plain stay so."""

import json

import pytest

from quire.config import quantization_file
from quire.models import gpt_oss
from quire.quant.base import Choice, Quantized, Use
from quire.quant.kept.numbers import Numbers
from quire.quant.plain.dense import Dense
from quire.registry import load
from tests.quant.published.common import SIZES
from tests.quant.test_dummy import loaded

BASE = {"bits": 4, "group_size": 128}
PATHS = {
    "q": ("model.layers.1.self_attn.q_proj", Use.PRODUCT),
    "down": ("model.layers.1.mlp.down_proj", Use.PRODUCT),
    "tenth": ("model.layers.10.mlp.down_proj", Use.PRODUCT),
    "expert": ("model.layers.1.mlp.experts.3.up_proj", Use.EXPERTS),
    "head": ("lm_head", Use.HEAD),
    "embedding": ("model.embed_tokens", Use.ROWS),
}
CASES = [
    ("gptq", {}, "q down tenth expert"),
    ("gptq", {"modules_in_block_to_quantize": []}, "q down tenth expert"),
    ("gptq", {"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]}, "q"),
    ("gptq", {"modules_in_block_to_quantize": ["mlp.down_proj"]}, "down tenth"),
    ("gptq", {"modules_in_block_to_quantize": ["model.layers.1.mlp.down_proj"]}, "down"),
    ("gptq", {"modules_in_block_to_quantize": [["mlp.experts"]], "lm_head": True}, "expert head"),
    ("gptq", {"modules_in_block_to_quantize": [["q_proj"]], "dynamic": {"-:.*layers.1.": {}}}, ""),
    ("auto-round", {"block_name_to_quantize": None}, "q down tenth expert"),
    ("auto-round", {"block_name_to_quantize": "model.layers"}, "q down tenth expert"),
    ("auto-round", {"block_name_to_quantize": "model.layers.1"}, "q down expert"),
    ("auto-round", {"block_name_to_quantize": "model.layers.0, model.layers.10"}, "tenth"),
    ("auto-round", {"block_name_to_quantize": ["model.layers.10"]}, "tenth"),
    ("auto-round", {"to_quant_block_names": [["model.layers.0"], ["model.layers.10"]]}, "tenth"),
    ("auto-round", {"quant_lm_head": True, "block_name_to_quantize": ["model.layers.10"]}, "tenth head"),
    ("auto-round", {"quant_lm_head": True, "extra_config": {"lm_head": {"bits": 16}}}, "q down tenth expert"),
    ("auto-round", {"extra_config": {"lm_head": {"bits": 8}}}, "q down tenth expert head"),
    ("auto-round", {"extra_config": {".*mlp.*": {"bits": 16, "data_type": "fp"}}}, "q"),
    (
        "auto-round",
        {"extra_config": {".*mlp.*": {"bits": 16}, PATHS["down"][0]: {"bits": 8}}, "act_bits": 16},
        "q down",
    ),
    ("fp8", {"activation_scheme": "dynamic", "ignored_layers": ["q_proj"]}, "down tenth expert"),
    (
        "fp8",
        {"activation_scheme": "dynamic", "ignored_layers": ["q_proj"], "modules_to_not_convert": ["model.layers.10"]},
        "down expert",
    ),
    ("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "expert"),
    ("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.mlp.experts"]}, ""),
    ("modelopt", {"quant_algo": "FP8", "ignore": ["lm_head"], "exclude_modules": ["*mlp*"]}, "q"),
]


@pytest.mark.parametrize(("method", "settings", "expected"), CASES)
def test_the_weights_that_a_config_names_are_quantized(method, settings, expected):
    find = load("quire.quant", quantization_file(method)).quantization(
        {**BASE, **settings} if method in BITS else settings
    )
    makers = {name: find(path, Choice(use, Dense, Numbers)) for name, (path, use) in PATHS.items()}
    assert {name for name, make in makers.items() if make is not Dense} == set(expected.split())


BITS = ("gptq", "auto-round")


def quantized(folder, fields: dict, settings: dict) -> set[str]:
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": settings}))
    _, kept, _ = loaded(str(folder))
    return {part.path for method in kept if isinstance(method, Quantized) for part in method.parts}


def test_models_keep_the_others_plain(tmp_path):
    settings = {"quant_method": "gptq", **BASE, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    ends = {path.rpartition(".")[2] for path in quantized(tmp_path, SIZES, settings)}
    assert ends == {"q_proj", "up_proj"}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    layers = {path.split(".")[2] for path in quantized(tmp_path, gpt_oss.TINY, settings)}
    assert layers == {"1", "2"}
