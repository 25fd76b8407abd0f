"""Quantizations that a config describes wrongly, or tensors that contradict it: one sentence, never wrong numbers."""

import pytest
import torch

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.quant._select import Globs, Modules, Targets, pattern
from quire.quant.base import Part
from quire.quant.fp8 import Blocks, checked_scales
from quire.quant.gptq import Gptq, group_order
from quire.registry import load

SLOW = ("(a+)+b", "(a|a){50}b", "(a?){30}a{30}", r"(.*)\1", ".*.*.*.*.*x", "a?a?a?a?a?a?aaaaaa")
PART = Part("layer", (64, 128))


@pytest.mark.parametrize("text", [*SLOW, "(", "[a", "x" * 301, 7, None])
def test_patterns_that_are_none_or_could_take_long_are_refused(text):
    with pytest.raises(BadModelFileError, match="ignore"):
        pattern(text, "ignore")


@pytest.mark.parametrize("text", [".*self_attn.(q|k|v|o)_proj$", r"model\.layers\.\d+\.mlp", ".*[.]7[.].*gate.*"])
def test_patterns_as_published_are_read(text):
    pattern(text, "targets")


@pytest.mark.parametrize("kind", [Modules, Targets, Globs])
@pytest.mark.parametrize("value", ["lm_head", 7, [7], {"lm_head": 1}])
def test_lists_must_be_lists_of_names(kind, value):
    with pytest.raises(BadModelFileError, match="ignore is not a list"):
        kind(value, "ignore")


BASE = {"bits": 4, "group_size": 128}
BAD = [
    ("gptq", {**BASE, "bits": 3}, "bits"),
    ("gptq", {**BASE, "bits": True}, "bits"),
    ("gptq", {**BASE, "group_size": 0}, "group_size"),
    ("gptq", {**BASE, "group_size": "128"}, "group_size"),
    ("gptq", {**BASE, "dynamic": [1]}, "dynamic"),
    ("gptq", {**BASE, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ("awq", {**BASE, "version": "gemv"}, "version"),
    ("awq", {**BASE, "group_size": -2}, "group_size"),
    ("fp8", {"activation_scheme": "sometimes"}, "activation_scheme"),
    ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [0, 128]}, "blocks of 128 x 128"),
    ("compressed_tensors", {}, "config_groups"),
    ("compressed_tensors", {"config_groups": {"g": {}}}, "config_groups"),
    ("compressed_tensors", {"config_groups": {}, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    ("compressed_tensors", {"config_groups": {}, "transform_config": {"x": 1}}, "transform_config"),
    ("compressed_tensors", {"config_groups": {"g": {"weights": {}, "format": "marlin-24"}}}, "format"),
    ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo"),
    ("bitsandbytes", {"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit"),
    ("auto_round", {**BASE, "packing_format": "auto_round:marlin"}, "packing_format"),
]


@pytest.mark.parametrize(("name", "settings", "says"), BAD)
def test_a_config_that_cannot_be_honoured_is_refused_by_its_key(name, settings, says):
    with pytest.raises((BadModelFileError, UnsupportedModelError), match=says):
        load("quire.quant", name).quantization(settings)


def test_tensors_that_contradict_their_config_are_refused():
    with pytest.raises(BadModelFileError, match="groups of 96 do not divide"):
        list(Gptq(4, 96, True, False).stored(PART))
    with pytest.raises(BadModelFileError, match="255"):
        checked_scales(PART, torch.tensor([120, 255], dtype=torch.uint8))
    with pytest.raises(BadModelFileError, match="not a finite number"):
        tensors = {".weight": torch.zeros(64, 128), ".weight_scale_inv": torch.tensor([[float("nan")]])}
        Blocks((128, 128)).read(PART, tensors)
    for groups in ([0, 0, 0, 1], [0, 1, 2, 2], [-1, 0, 1, 1]):
        with pytest.raises(BadModelFileError, match="g_idx"):
            group_order(PART, torch.tensor(groups, dtype=torch.int32), 2)
