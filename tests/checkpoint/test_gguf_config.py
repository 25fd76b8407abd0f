"""Configs from GGUF headers, against what transformers makes of them; models that run are in test_gguf_families.py."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.checkpoint.find import ModelFiles, find
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.gguf_architectures import GGUF_ARCHITECTURES, unpermute_rows
from quire.checkpoint.hf_config import read_config, read_generation_config
from quire.errors import BadModelFileError, UnsupportedModelError

SIZES = {
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.vocab_size": 20,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 500000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
}
LLAMA = GGUF_ARCHITECTURES["llama"]
LAYER = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (48, 32),
    "ffn_up": (48, 32),
    "ffn_down": (32, 48),
}
COMPARED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "model_type",
)


def write_gguf(
    path: Path,
    keys: dict[str, Any] = {},
    tensors: dict[str, np.ndarray] = {},
    *,
    without: tuple[str, ...] = (),
    architecture: str = "llama",
) -> ModelFiles:
    """A tiny llama, or its like, with random weights, changed by `keys`, `tensors` and `without`."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"general.name": "tiny", **SIZES, **keys}.items():
        if key in without:
            continue
        key = key.replace("llama.", f"{architecture}.")
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: "BOOL", int: "INT32", float: "FLOAT32", str: "STRING"}
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (20, 32), "output_norm": (32,), "output": (20, 32)}
    for layer_idx in range(2):
        shapes |= {f"blk.{layer_idx}.{name}": shape for name, shape in LAYER.items()}
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, weight in {**weights, **tensors}.items():
        if name not in without:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("tiny", "gguf", path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_has_the_config_names_and_weights_transformers_finds_in_it(architecture: str, tmp_path: Path) -> None:
    keys, tensors = {}, {}
    if architecture == "qwen3":
        keys = {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128}  # transformers knows only 128
        shapes = {
            "q": (512, 32),
            "k": (256, 32),
            "v": (256, 32),
            "output": (32, 512),
            "q_norm": (128,),
            "k_norm": (128,),
        }
        for layer_idx in range(2):
            for name, shape in shapes.items():
                weight = np.random.default_rng(1).standard_normal(shape, np.float32)
                tensors[f"blk.{layer_idx}.attn_{name}.weight"] = weight
    files = write_gguf(tmp_path / "tiny.gguf", keys, tensors, architecture=architecture)
    truth_config = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(truth_config)
    expected = load_gguf_checkpoint(files.path, return_tensors=True, model_to_load=model)["tensors"]
    config = read_config(files)
    for key in COMPARED_KEYS:
        assert config[key] == getattr(truth_config, key, False), key
    assert config["rope_theta"] == truth_config.rope_parameters["rope_theta"]
    assert config["rope_scaling"] is None
    assert config["architectures"] == [type(model).__name__]
    with GGUFFile(files.path) as file:
        for tensor in file.tensors.values():
            stored = np.frombuffer(file.data(tensor), np.float32).reshape(tensor.shape)
            weight = torch.from_numpy(stored.copy())
            if architecture == "llama" and "attn_q" in tensor.name:
                weight = weight[unpermute_rows(32, 4)]
            if architecture == "llama" and "attn_k" in tensor.name:
                weight = weight[unpermute_rows(16, 2)]
            hf_name = GGUF_ARCHITECTURES[architecture].name(tensor.name)
            assert hf_name is not None and torch.equal(expected.pop(hf_name), weight)
    assert not expected


def test_unpermuted_rows_rotate_in_halves_as_the_stored_ones_do_in_pairs() -> None:
    num_heads, head_dim = 3, 8
    stored = np.random.default_rng(0).standard_normal(num_heads * head_dim)
    angle = np.arange(head_dim // 2) + 0.5

    def rotated(first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
        return [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ]

    pairs = stored.reshape(num_heads, head_dim // 2, 2)
    rotated_pairs = np.stack(rotated(pairs[..., 0], pairs[..., 1]), axis=-1)
    rows = unpermute_rows(num_heads * head_dim, num_heads)
    first, second = np.split(stored[rows].reshape(num_heads, head_dim), 2, axis=1)
    rotated_halves = np.concatenate(rotated(first, second), axis=1)
    assert np.array_equal(rotated_pairs.reshape(-1)[rows], rotated_halves.reshape(-1))
    assert sorted(rows) == list(range(num_heads * head_dim))


def test_the_default_model_has_its_published_config() -> None:
    config = read_config(find("smollm2"))
    published = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    assert {key: config[key] for key in published} == published
    assert math.isclose(config["rms_norm_eps"], 1e-5, rel_tol=1e-6)
    assert read_generation_config(find("smollm2")) == {"eos_token_id": [2]}


def test_what_a_header_leaves_out_gets_its_default(tmp_path: Path) -> None:
    without = (
        "llama.attention.head_count_kv",
        "llama.vocab_size",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
        "output.weight",
    )
    config = read_config(write_gguf(tmp_path / "tiny.gguf", without=without))
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 8
    assert config["vocab_size"] == 20
    assert config["rope_theta"] == 10000
    assert config["tie_word_embeddings"]
    for key in ("sliding_window", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[key] is None


def test_rarer_keys_are_understood(tmp_path: Path) -> None:
    keys = {
        "llama.attention.head_count_kv": [2, 2],
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 64,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(20)],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.padding_token_id": -1,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    bias = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    files = write_gguf(tmp_path / "tiny.gguf", keys, bias)
    config = read_config(files)
    assert (config["num_key_value_heads"], config["head_dim"], config["sliding_window"]) == (2, 16, 64)
    assert config["attention_bias"]
    assert (config["eos_token_id"], config["pad_token_id"]) == (3, None)
    assert read_generation_config(files) == {"eos_token_id": [1, 3], "temperature": 0.5, "top_k": 20}


ROPE = {
    "none": ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear, as in 2023": ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    ),
    "yarn with a magnitude": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.yarn_attn_factor": 1.5,
        },
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5},
    ),
    "yarn with its own magnitude": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.yarn_attn_factor": 1.0,
        },
        {"rope_type": "yarn", "factor": 8.0},
    ),
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling_is_translated(kind: str, tmp_path: Path) -> None:
    keys, expected = ROPE[kind]
    assert read_config(write_gguf(tmp_path / "tiny.gguf", keys))["rope_scaling"] == expected


def test_rope_factors_come_with_the_config_and_are_no_weights(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1, 1, 2.5, 8], np.float32)}
    config = read_config(write_gguf(tmp_path / "tiny.gguf", tensors=factors))
    assert config["rope_scaling"] == {"rope_type": "gguf_factors", "factors": [1, 1, 2.5, 8]}
    assert LLAMA.name("rope_freqs.weight") is None


BAD_KEYS: dict[str, dict[str, Any]] = {
    "no heads": {"llama.attention.head_count": 0},
    "a negative size": {"llama.embedding_length": -32},
    "a size that is text": {"llama.embedding_length": "32"},
    "a size that is a fraction": {"llama.embedding_length": 32.5},
    "a size that is true": {"llama.block_count": True},
    "a billion layers": {"llama.block_count": 1_000_000_000},
    "more heads than dimensions": {"llama.attention.head_count": 64},
    "KV heads that do not divide the heads": {"llama.attention.head_count_kv": 3},
    "an epsilon of infinity": {"llama.attention.layer_norm_rms_epsilon": math.inf},
    "a RoPE base of NaN": {"llama.rope.freq_base": math.nan},
    "more rotated dimensions than there are": {"llama.rope.dimension_count": 10},
    "a RoPE factor of zero": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
    "a RoPE factor that is text": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "4"},
    "a window that is text": {"llama.attention.sliding_window": "x"},
}


@pytest.mark.parametrize("flaw", BAD_KEYS)
def test_values_that_make_no_sense_are_refused(flaw: str, tmp_path: Path) -> None:
    with pytest.raises(BadModelFileError, match=r"tiny\.gguf"):
        read_config(write_gguf(tmp_path / "tiny.gguf", BAD_KEYS[flaw]))


@pytest.mark.parametrize("factors", [[1, 1, 2], [1, 1, 2, 0], [1, 1, 2, math.nan]])
def test_rope_factors_that_make_no_sense_are_refused(factors: list[float], tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
    with pytest.raises(BadModelFileError):
        read_config(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModelFileError, match=r"lacks llama\.block_count"):
        read_config(write_gguf(tmp_path / "tiny.gguf", without=("llama.block_count",)))


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "different sizes": {"llama.attention.head_count_kv": [2, 4]},
    "longrope": {"llama.rope.scaling.type": "longrope"},
    "yarn_log_multiplier": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
    "rotates 4 of 8": {"llama.rope.dimension_count": 4},
    "values of another size": {"llama.attention.value_length": 4},
    "attention.causal": {"llama.attention.causal": False},
    "attention.clamp_kqv": {"llama.attention.clamp_kqv": 8.0},
    "logit_scale": {"llama.logit_scale": 0.5},
    "attn_logit_softcapping": {"llama.attn_logit_softcapping": 30.0},
    "rope.freq_base_swa": {"llama.rope.freq_base_swa": 10000.0},
    "rope.scaling.alpha": {"llama.rope.scaling.alpha": 2.0},
    "expert_gating_func": {"llama.expert_count": 8, "llama.expert_gating_func": 2},
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_would_change_the_mathematics_and_is_not_understood_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        read_config(write_gguf(tmp_path / "tiny.gguf", UNSUPPORTED[what]))


def test_a_window_is_for_files_whose_models_have_one(tmp_path: Path) -> None:
    window = {"llama.attention.sliding_window": 64}
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.attention\.sliding_window"):
        read_config(write_gguf(tmp_path / "tiny.gguf", window, architecture="qwen2"))
    off = {"llama.attention.sliding_window": 0}
    assert read_config(write_gguf(tmp_path / "tiny.gguf", off, architecture="qwen2"))["sliding_window"] is None


WINDOW = {"llama.attention.sliding_window": 64, "llama.block_count": 7}
PATTERNS = {
    "its own": ({}, "SSSSSFS"),
    "a period": ({"llama.attention.sliding_window_pattern": 3}, "SSFSSFS"),
    "a list": ({"llama.attention.sliding_window_pattern": [True, False, False, True, True, False, True]}, "SFFSSFS"),
    "no window": ({"llama.attention.sliding_window": 0}, "FFFFFFF"),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_which_layers_have_a_window_is_as_the_file_says(kind: str, tmp_path: Path) -> None:
    keys, expected = PATTERNS[kind]
    config = read_config(write_gguf(tmp_path / "tiny.gguf", {**WINDOW, **keys}, architecture="gemma3"))
    assert "".join("S" if layer == "sliding_attention" else "F" for layer in config["layer_types"]) == expected


@pytest.mark.parametrize("pattern", [-1, "x", [True, False]])
def test_a_pattern_that_makes_no_sense_is_refused(pattern: Any, tmp_path: Path) -> None:
    keys = {**WINDOW, "llama.attention.sliding_window_pattern": pattern}
    with pytest.raises(BadModelFileError, match="each layer"):
        read_config(write_gguf(tmp_path / "tiny.gguf", keys, architecture="gemma3"))


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_what_heads_share(
    architecture: str, num_layers: int, tmp_path: Path
) -> None:
    """As their published configs do; the others by the size of a head."""
    for layers, scalar in ((num_layers, 32 // 4), (26, 16)):
        keys = {"llama.block_count": layers, "llama.attention.key_length": 16, "llama.rope.dimension_count": 16}
        config = read_config(write_gguf(tmp_path / "tiny.gguf", keys, architecture=architecture))
        assert config["query_pre_attn_scalar"] == scalar


def test_a_fused_projection_is_divided_and_its_rows_put_in_order() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    pieces = dict(LLAMA.pieces("blk.0.attn_qkv.weight", (64, 32), config))
    prefix = "model.layers.0.self_attn"
    assert pieces[f"{prefix}.q_proj.weight"] == unpermute_rows(32, 4)
    assert pieces[f"{prefix}.k_proj.weight"] == [32 + row for row in unpermute_rows(16, 2)]
    assert pieces[f"{prefix}.v_proj.weight"] == slice(48, 64)
    fused = dict(GGUF_ARCHITECTURES["phi3"].pieces("blk.0.attn_qkv.weight", (64, 32), config))
    assert fused == {f"{prefix}.qkv_proj.weight": slice(0, 64)}


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
    }
    row = GGUF_ARCHITECTURES["glm4moe"]
    assert not list(row.pieces("blk.2.nextn.eh_proj.weight", (32, 64), config))
    assert list(row.pieces("blk.1.attn_norm.weight", (32,), config)) == [
        ("model.layers.1.input_layernorm.weight", slice(0, 32))
    ]


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'rwkv7': Quire reads GGUF files of llama"):
        read_config(write_gguf(tmp_path / "tiny.gguf", architecture="rwkv7"))


FOREIGN_NAMES = [
    "",
    "x",
    "blk.0.weight",
    "blk.x.attn_q.weight",
    "blk.99999.attn_q.weight",
    "blk.0.attn_q.scale",
    "token_embd",
    "blk.0.output.weight",
    "attn_q.weight",
]


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_tensor_that_is_not_the_familys_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError):
        LLAMA.name(name)
