"""A model's config in Hugging Face's vocabulary, whichever kind of file it comes from.

Called by the frontend and by the worker's builder, with what `find` found. Knows the keys of config.json and of GGUF
and how one becomes the other; not what a model does with them. Code that a folder brings (`auto_map`) is never run.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf import GGUFFile
from quire.errors import BadModelFileError, ModelNotFoundError, UnsupportedModelError

_MAX_JSON_BYTES = 1 << 24

# The largest value of each count that is believed, far above real models: the builder loops over and multiplies these.
_LIMITS = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}


_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def read_config(files: ModelFiles) -> dict[str, Any]:
    """config.json's dict, or what it would be for a GGUF file.

    In one spelling: RoPE as `rope_theta` and `rope_scaling` (None or a dict with `rope_type`), precision as `dtype`.
    """
    if files.kind == "gguf":
        return config_from_gguf(files.gguf)
    config = _read_json(files.path / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise BadModelFileError(f"{files.name}/config.json names no architectures: use a language model's config.")
    _use_one_spelling(config)
    return _checked(config, f"{files.name}/config.json")


def read_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The model's sampling defaults and end tokens, in generation_config.json's vocabulary; empty if it has none."""
    if files.kind == "gguf":
        return generation_config_from_gguf(files.gguf)
    path = files.path / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}.") from None
    if len(raw) > _MAX_JSON_BYTES:
        raise BadModelFileError(f"{path.name} is larger than {_MAX_JSON_BYTES >> 20} MiB, which no config is.")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and absurdly long numbers
        raise BadModelFileError(f"{path.name} is not valid JSON ({error}): fetch it again.") from None
    if not isinstance(value, dict):
        raise BadModelFileError(f"{path.name} holds no JSON object: fetch it again.")
    return value


def _use_one_spelling(config: dict[str, Any]) -> None:
    """config.json has changed its vocabulary over the years: readers behind us meet one."""
    if "torch_dtype" in config:
        config.setdefault("dtype", config.pop("torch_dtype"))
    for theirs, ours in _OLD_NAMES.items():
        if theirs in config:
            config.setdefault(ours, config.pop(theirs))
    rope = config.get("rope_parameters")
    # A model with several kinds of layers has one dict per kind instead: its model file reads those.
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        del config["rope_parameters"]
        apart = ("rope_theta", "partial_rotary_factor")
        config["rope_scaling"] = {key: value for key, value in rope.items() if key not in apart}
        config.update({key: rope[key] for key in apart if key in rope})
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        if scaling.get("rope_type", "default") == "default":
            config["rope_scaling"] = None


def _checked(config: dict[str, Any], source: str) -> dict[str, Any]:
    for key, limit in _LIMITS.items():
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 < value <= limit):
            raise BadModelFileError(f"{source} gives {key} as {value!r:.80}, not a whole number from 1 to {limit}.")
    for key in ("rms_norm_eps", "rope_theta"):
        value = config.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise BadModelFileError(f"{source} gives {key} as {value!r:.80}, not a positive number.")
    full_layers, layer_types = config.get("max_window_layers"), config.get("layer_types")
    if full_layers is not None and (type(full_layers) is not int or full_layers < 0):
        raise BadModelFileError(f"{source} gives max_window_layers as {full_layers!r:.80}, not a whole number.")
    if layer_types is not None and (type(layer_types) is not list or len(layer_types) < config.get("num_hidden_layers", 0)):
        raise BadModelFileError(f"{source} does not give every layer its own of the layer_types.")
    num_heads, num_kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if num_heads and num_kv_heads and num_heads % num_kv_heads:
        raise BadModelFileError(f"{source} gives {num_heads} heads, not a multiple of its {num_kv_heads} KV heads.")
    return config


# ---- GGUF: one row per architecture ----


@dataclass(frozen=True, slots=True)
class _GGUFArchitecture:
    """How files of one `general.architecture` translate. `keys`: HF key -> GGUF key after the architecture's prefix."""

    architecture: str  # HF class
    model_type: str
    keys: Mapping[str, str]
    tensors: Mapping[str, str]  # GGUF -> HF tensor name, {} for the layer's index
    permutes_qk: bool  # rows of q and k are stored in another order: see `unpermute_rows`


_COMMON_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
}
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")

_COMMON_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_QK_NORM_TENSORS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}

_YARN_KEYS = {
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}

GGUF_ARCHITECTURES: dict[str, _GGUFArchitecture] = {
    "llama": _GGUFArchitecture("LlamaForCausalLM", "llama", _COMMON_KEYS, _COMMON_TENSORS, permutes_qk=True),
    "qwen3": _GGUFArchitecture(
        "Qwen3ForCausalLM", "qwen3", _COMMON_KEYS, {**_COMMON_TENSORS, **_QK_NORM_TENSORS}, permutes_qk=False
    ),
}

# Llama 3.1 and later: what the converter computed from the "llama3" scaling, one divisor of the frequency per rotated
# pair. Its parameters are not in the file, so the config says `rope_type: gguf_factors` and carries the factors.
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_architecture(gguf: GGUFFile) -> _GGUFArchitecture:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadModelFileError(f"{gguf.path.name} names no architecture: fetch it again or use another file.")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{gguf.path.name} has the architecture {name!r:.80}: Quire reads GGUF files of {known}."
        )
    if gguf.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(f"{gguf.path.name} is one of several parts: join them, `llama-gguf-split --merge`.")
    if gguf.metadata.get(f"{name}.expert_count", 0):
        raise UnsupportedModelError(f"{gguf.path.name} is a mixture of experts: Quire cannot read those from GGUF yet.")
    return GGUF_ARCHITECTURES[name]


def config_from_gguf(gguf: GGUFFile) -> dict[str, Any]:
    """The config.json such a file would have had, as far as inference needs it."""
    row = gguf_architecture(gguf)
    meta, prefix = gguf.metadata, gguf.metadata["general.architecture"]
    config: dict[str, Any] = {"architectures": [row.architecture], "model_type": row.model_type, "hidden_act": "silu"}
    for hf_key, gguf_key in row.keys.items():
        if (value := meta.get(f"{prefix}.{gguf_key}")) is not None:
            config[hf_key] = _same_in_all_layers(value, gguf)
    if missing := [key for key in _REQUIRED if key not in config]:
        raise BadModelFileError(f"{gguf.path.name} lacks {prefix}.{row.keys[missing[0]]}: use another file.")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    config["sliding_window"] = config.get("sliding_window") or None
    if (embedding := gguf.tensors.get("token_embd.weight")) is not None:
        config["vocab_size"] = embedding.shape[0]
    elif "vocab_size" not in config:
        config["vocab_size"] = len(meta.get("tokenizer.ggml.tokens", ()))
    _checked(config, gguf.path.name)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _checked(config, gguf.path.name)
    config.update(_rope(gguf, prefix, config["head_dim"]))
    config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    for key in ("bos", "eos", "pad"):
        config[f"{key}_token_id"] = _token_id(meta, "padding" if key == "pad" else key, config["vocab_size"])
    return config


def generation_config_from_gguf(gguf: GGUFFile) -> dict[str, Any]:
    meta = gguf.metadata
    vocab_size = len(meta.get("tokenizer.ggml.tokens", ()))
    # A turn of a chat may end with its own token, or one that calls a tool.
    ends = [_token_id(meta, key, vocab_size) for key in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": sorted({token_id for token_id in ends if token_id is not None})}
    for hf_key, gguf_key in _SAMPLING_KEYS.items():
        if (value := meta.get(f"general.sampling.{gguf_key}")) is not None:
            config[hf_key] = value
    return config


def _same_in_all_layers(value: Any, gguf: GGUFFile) -> Any:
    """Some converters write one value per layer even when all are the same."""
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        raise UnsupportedModelError(f"{gguf.path.name} has layers of different sizes: Quire cannot read those yet.")
    return value[0]


def _token_id(meta: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
    # "None" is sometimes written as -1 in an unsigned field.
    return token_id if type(token_id) is int and 0 <= token_id < vocab_size else None


def _rope(gguf: GGUFFile, prefix: str, head_dim: int) -> dict[str, Any]:
    meta = gguf.metadata
    rotary_dim = meta.get(f"{prefix}.rope.dimension_count", head_dim)
    if type(rotary_dim) is not int or not 0 < rotary_dim <= head_dim:
        raise BadModelFileError(f"{gguf.path.name} rotates {rotary_dim!r:.80} of {head_dim} dimensions.")
    rope: dict[str, Any] = {"rope_scaling": _rope_scaling(gguf, prefix, rotary_dim)}
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    return rope


def _rope_scaling(gguf: GGUFFile, prefix: str, rotary_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in gguf.tensors:
        return {"rope_type": "gguf_factors", "factors": _rope_factors(gguf, rotary_dim)}
    scaling = {key.removeprefix(f"{prefix}.rope.scaling."): value for key, value in gguf.metadata.items()}
    rope_type = scaling.get("type", "none")
    factor = scaling.get("factor", 1.0)
    if f"{prefix}.rope.scale_linear" in gguf.metadata:  # how files of 2023 said it
        rope_type, factor = "linear", gguf.metadata[f"{prefix}.rope.scale_linear"]
    if type(factor) is not float or not 0 < factor < math.inf:
        raise BadModelFileError(f"{gguf.path.name} scales RoPE by {factor!r:.80}: use another file.")
    if rope_type == "none" or (rope_type == "linear" and factor == 1.0):
        return None
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    # Adjustments of yarn that a config.json has no word for: computing without them would be silently wrong.
    neutral = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
    odd = [key for key, value in neutral.items() if scaling.get(key, value) != value]
    if rope_type != "yarn" or odd:
        what = f"{rope_type!r:.80}" + (f" with {odd[0]}" if odd else "")
        raise UnsupportedModelError(f"{gguf.path.name} scales RoPE by {what}, which Quire does not read from GGUF yet.")
    yarn = {"rope_type": "yarn", "factor": factor}
    for hf_key, gguf_key in _YARN_KEYS.items():
        if gguf_key in scaling:
            yarn[hf_key] = scaling[gguf_key]
    return yarn


def _rope_factors(gguf: GGUFFile, rotary_dim: int) -> list[float]:
    tensor = gguf.tensors[_ROPE_FACTORS]
    if tensor.type_name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise BadModelFileError(f"{gguf.path.name} has {_ROPE_FACTORS} as {tensor.type_name} of shape {tensor.shape}.")
    factors = list(struct.unpack(f"<{rotary_dim // 2}f", gguf.data(tensor)))
    if not all(0 < factor < math.inf for factor in factors):
        raise BadModelFileError(f"{gguf.path.name} has RoPE factors that are not positive numbers: use another file.")
    return factors


_TENSOR_NAME = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", re.ASCII)
# Derived from the config: `rope_scaling` carries the first, the second is a constant.
_IGNORED_TENSORS = ("rope_freqs", "attn_rot_embd")


def gguf_name_to_hf(name: str, architecture: str = "llama") -> str | None:
    """The tensor's name in a Hugging Face checkpoint; None for tensors that are no weights."""
    if match := _TENSOR_NAME.fullmatch(name):
        layer_idx, stem, kind = match.groups()
        if stem in _IGNORED_TENSORS:
            return None
        hf_name = GGUF_ARCHITECTURES[architecture].tensors.get(stem if layer_idx is None else f"blk.{{}}.{stem}")
        if hf_name is not None:
            return f"{hf_name.format(layer_idx)}.{kind}"
    raise UnsupportedModelError(f"the GGUF file holds a tensor {name!r:.80} that {architecture} models do not have.")


def unpermute_rows(num_rows: int, num_heads: int) -> list[int]:
    """For each row of the HF weight, which stored row it is: `hf = stored[unpermute_rows(...)]`.

    Architectures with `permutes_qk` store the rows of attn_q and attn_k (weights and biases) in the order of
    interleaved RoPE: within each head, rows i and i + head_dim/2, which rotate together, are stored as 2i and 2i + 1.
    Whoever loads such a file into a model that rotates halves, as Hugging Face's do, must undo it, with `num_heads`
    being that of q or of k. A row is a whole number of blocks, so packed weights can be reordered as they are.
    """
    head_dim = num_rows // num_heads
    one_head = [2 * pair + half for half in range(2) for pair in range(head_dim // 2)]
    return [head * head_dim + row for head in range(num_heads) for row in one_head]
