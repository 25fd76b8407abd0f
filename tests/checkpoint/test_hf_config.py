"""Configs from config.json, against what transformers says in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.hf_config import read_config, read_generation_config
from quire.errors import BadModelFileError, ModelNotFoundError


def write_config(folder: Path, config: dict[str, Any] | str) -> ModelFiles:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return ModelFiles("tiny", "hf", folder)


def test_a_config_saved_by_transformers_reads_in_one_spelling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    LlamaConfig(rope_parameters=rope, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = read_config(ModelFiles("tiny", "hf", tmp_path))
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config["dtype"] == "bfloat16"
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert read_config(ModelFiles("tiny", "hf", tmp_path))["rope_scaling"] is None


def test_an_older_config_reads_in_the_same_spelling(tmp_path: Path) -> None:
    old = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "rope_theta": 1e6,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "auto_map": {"AutoModel": "evil.Model"},
    }
    config = read_config(write_config(tmp_path, old))
    assert config["dtype"] == "float16"
    assert (config["rope_theta"], config["rope_scaling"]) == (1e6, {"rope_type": "linear", "factor": 2.0})


BAD_CONFIGS = {
    "not JSON": "{",
    "not an object": "[]",
    "nested beyond reason": "[" * 100_000,
    "a number beyond reason": '{"a": ' + "9" * 100_000 + "}",
    "larger than any config": " " * (1 << 24) + "{}",
    "no architectures": "{}",
    "architectures that are a name": '{"architectures": "LlamaForCausalLM"}',
    "architectures that are numbers": '{"architectures": [1]}',
    "negative layers": '{"architectures": ["X"], "num_hidden_layers": -1}',
    "layers that are text": '{"architectures": ["X"], "num_hidden_layers": "2"}',
    "a billion heads": '{"architectures": ["X"], "num_attention_heads": 1000000000}',
    "a billion experts": '{"architectures": ["X"], "num_local_experts": 1000000000}',
    "an epsilon of NaN": '{"architectures": ["X"], "rms_norm_eps": NaN}',
    "negative layers without a window": '{"architectures": ["X"], "max_window_layers": -1}',
    "types of layers that are text": '{"architectures": ["X"], "layer_types": "full_attention"}',
    "layers without a type": '{"architectures": ["X"], "num_hidden_layers": 2, "layer_types": ["full_attention"]}',
}


@pytest.mark.parametrize("flaw", BAD_CONFIGS)
def test_a_config_that_makes_no_sense_is_refused(flaw: str, tmp_path: Path) -> None:
    with pytest.raises(BadModelFileError, match=r"config\.json"):
        read_config(write_config(tmp_path, BAD_CONFIGS[flaw]))


def test_a_config_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}\x80")
    with pytest.raises(BadModelFileError):
        read_config(ModelFiles("tiny", "hf", tmp_path))


def test_a_folder_without_a_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_config(ModelFiles("tiny", "hf", tmp_path))


def test_generation_config_is_read_where_there_is_one(tmp_path: Path) -> None:
    files = write_config(tmp_path, {"architectures": ["X"]})
    assert read_generation_config(files) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert read_generation_config(files) == {"temperature": 0.6, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BadModelFileError, match=r"generation_config\.json"):
        read_generation_config(files)
