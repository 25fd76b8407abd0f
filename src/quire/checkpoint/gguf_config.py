"""The config.json that a GGUF file would have had, by the tables of `gguf_architectures`.

Called by `hf_config`. A key that would change the mathematics is understood or refused, never ignored.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.gguf_architectures import SCALING, GGUFArchitecture, gguf_architecture
from quire.checkpoint.sanity import checked
from quire.errors import BadModelFileError, UnsupportedModelError

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
)
_PATTERN = "attention.sliding_window_pattern"
_YARN_KEYS = {
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# Keys that are read below, or do not change the logits.
_READ = {
    "vocab_size",
    "context_length",
    "attention.value_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "expert_shared_feed_forward_length",
    "pooling_type",
    "tensor_data_layout",
    "rope.dimension_count",
    "rope.scale_linear",
    SCALING + "type",
    SCALING + "factor",
    SCALING + "attn_factor",
    SCALING + "finetuned",
    SCALING + "yarn_log_multiplier",
    SCALING + "yarn_ext_factor",
    *(SCALING + key for key in _YARN_KEYS.values()),
}

_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def config_from_gguf(gguf: GGUFFile) -> dict[str, Any]:
    """The config.json such a file would have had, as far as inference needs it."""
    row = gguf_architecture(gguf)
    meta = gguf.metadata
    prefix = f"{meta['general.architecture']}."
    values = {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}
    _refuse_what_is_not_understood(values, row, gguf)
    config: dict[str, Any] = {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        "hidden_act": "silu",
        **row.defaults,
    }
    config |= {hf_key: _number(values[key], prefix + key, gguf) for hf_key, key in row.keys.items() if key in values}
    if missing := [key for key in _REQUIRED if key in row.keys and key not in config]:
        raise BadModelFileError(f"{gguf.path.name} lacks {prefix}{row.keys[missing[0]]}: use another file.")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    config["sliding_window"] = config.get("sliding_window") or None
    if (embedding := gguf.tensors.get("token_embd.weight")) is not None:
        config["vocab_size"] = embedding.shape[0]
    elif "vocab_size" not in config:
        config["vocab_size"] = len(meta.get("tokenizer.ggml.tokens", ()))
    checked(config, gguf.path.name)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    checked(config, gguf.path.name)
    config.update(_rope(gguf, values, row, config["head_dim"]))
    if row.window_period is not None:
        config["layer_types"] = _layer_types(values, row.window_period, config, gguf)
    config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors or "blk.0.attn_qkv.bias" in gguf.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    for key in ("bos", "eos", "pad"):
        config[f"{key}_token_id"] = _token_id(meta, "padding" if key == "pad" else key, config["vocab_size"])
    if row.finish is not None:
        row.finish(config, gguf)
    return checked(config, gguf.path.name)


def generation_config_from_gguf(gguf: GGUFFile) -> dict[str, Any]:
    meta = gguf.metadata
    vocab_size = len(meta.get("tokenizer.ggml.tokens", ()))
    # A turn of a chat may end with a token of its own (eot), or with one that calls a tool (eom).
    ends = [_token_id(meta, key, vocab_size) for key in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": sorted({token_id for token_id in ends if token_id is not None})}
    for hf_key, gguf_key in _SAMPLING_KEYS.items():
        if (value := meta.get(f"general.sampling.{gguf_key}")) is not None:
            config[hf_key] = value
    return config


def _refuse_what_is_not_understood(values: Mapping[str, Any], row: GGUFArchitecture, gguf: GGUFFile) -> None:
    known = {*row.keys.values(), *_READ}
    if row.window_period is not None:
        known.add(_PATTERN)
    # Values that mean the same as the key's absence; for keys that are not listed this is zero.
    neutral = {
        "attention.causal": (True,),
        "rope.freq_base_swa": (values.get("rope.freq_base"),),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "expert_gating_func": (0, 2 if row.routes_by_sigmoid else 1),
        "expert_feed_forward_length": (0, values.get("feed_forward_length")),
    }
    for key, value in values.items():
        if key not in known and value not in neutral.get(key, (0,)):
            name = f"{gguf.metadata['general.architecture']}.{key}"
            raise UnsupportedModelError(
                f"{gguf.path.name} has {name} = {value!r:.80}, which Quire does not know in such files: "
                "use another file."
            )


def _number(value: Any, key: str, gguf: GGUFFile) -> int | float:
    """Some converters write one value per layer even when all are the same."""
    if isinstance(value, list):
        if not value or any(other != value[0] for other in value):
            raise UnsupportedModelError(f"{gguf.path.name} has layers of different sizes: Quire cannot read those yet.")
        value = value[0]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise BadModelFileError(f"{gguf.path.name} gives {key} as {value!r:.80}, not a number: use another file.")
    return value


def _layer_types(values: Mapping[str, Any], period: int, config: Mapping[str, Any], gguf: GGUFFile) -> list[str]:
    num_layers = config["num_hidden_layers"]
    pattern = values.get(_PATTERN, period)
    if type(pattern) is int and pattern > 0:
        pattern = [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise BadModelFileError(
            f"{gguf.path.name} does not say of each layer whether it has a window: use another file."
        )
    has_window = bool(config["sliding_window"])
    return ["sliding_attention" if has_window and slides else "full_attention" for slides in pattern]


def _token_id(meta: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
    # "None" is sometimes written as -1 in an unsigned field.
    return token_id if type(token_id) is int and 0 <= token_id < vocab_size else None


# ---- positions ----


def _rope(gguf: GGUFFile, values: Mapping[str, Any], row: GGUFArchitecture, head_dim: int) -> dict[str, Any]:
    if values.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{gguf.path.name} has values of another size than keys: Quire cannot read those yet."
        )
    rotary_dim = values.get("rope.dimension_count", head_dim)
    if type(rotary_dim) is not int or not 0 < rotary_dim <= head_dim:
        raise BadModelFileError(f"{gguf.path.name} rotates {rotary_dim!r:.80} of {head_dim} dimensions.")
    rope: dict[str, Any] = {"rope_scaling": _rope_scaling(gguf, values, rotary_dim)}
    if "partial_rotary_factor" in row.keys:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    elif rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{gguf.path.name} rotates {rotary_dim} of {head_dim} dimensions, which Quire does not know in such files."
        )
    return rope


def _rope_scaling(gguf: GGUFFile, values: Mapping[str, Any], rotary_dim: int) -> dict[str, Any] | None:
    scaling = {key.removeprefix(SCALING): value for key, value in values.items() if key.startswith(SCALING)}
    if "rope_freqs.weight" in gguf.tensors:
        # Llama 3.1 and later: what the converter computed from the "llama3" scaling, one divisor of the frequency per
        # rotated pair. Its parameters are not in the file.
        return {"rope_type": "gguf_factors", "factors": _factors(gguf, "rope_freqs.weight", rotary_dim)}
    if "rope_factors_long.weight" in gguf.tensors:
        return _longrope(gguf, scaling, rotary_dim)
    rope_type, factor = scaling.get("type", "none"), scaling.get("factor", 1.0)
    if "rope.scale_linear" in values:  # how files of 2023 give it
        rope_type, factor = "linear", values["rope.scale_linear"]
    if type(factor) is not float or not 0 < factor < math.inf:
        raise BadModelFileError(f"{gguf.path.name} scales RoPE by {factor!r:.80}: use another file.")
    if rope_type == "none":
        return None
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if rope_type != "yarn":
        what = f"{rope_type!r:.80}"
        raise UnsupportedModelError(f"{gguf.path.name} scales RoPE by {what}, which Quire does not read from GGUF yet.")
    return _yarn(gguf, scaling, factor)


def _yarn(gguf: GGUFFile, scaling: dict[str, Any], factor: float) -> dict[str, Any]:
    # Adjustments of yarn that config.json has no key for: without them the results would be wrong without an error.
    neutral = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
    adjusted = [key for key, value in neutral.items() if scaling.get(key, value) != value]
    if adjusted:
        what = f"'yarn' with {adjusted[0]}"
        raise UnsupportedModelError(f"{gguf.path.name} scales RoPE by {what}, which Quire does not read from GGUF yet.")
    if scaling.get("yarn_attn_factor") == 1.0:
        del scaling["yarn_attn_factor"]  # converters write 1 for the factor that yarn itself computes
    given = {hf_key: scaling[key] for hf_key, key in _YARN_KEYS.items() if key in scaling}
    return {"rope_type": "yarn", "factor": factor, **given}


def _longrope(gguf: GGUFFile, scaling: Mapping[str, Any], rotary_dim: int) -> dict[str, Any]:
    if "rope_factors_short.weight" not in gguf.tensors:
        raise BadModelFileError(f"{gguf.path.name} has RoPE factors for long contexts only: use another file.")
    return {
        "rope_type": "longrope",
        "long_factor": _factors(gguf, "rope_factors_long.weight", rotary_dim),
        "short_factor": _factors(gguf, "rope_factors_short.weight", rotary_dim),
        "original_max_position_embeddings": scaling.get("original_context_length"),
        "attention_factor": scaling.get("attn_factor"),
    }


def _factors(gguf: GGUFFile, name: str, rotary_dim: int) -> list[float]:
    tensor = gguf.tensors[name]
    if tensor.type_name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise BadModelFileError(f"{gguf.path.name} has {name} as {tensor.type_name} of shape {tensor.shape}.")
    factors = list(struct.unpack(f"<{rotary_dim // 2}f", gguf.data(tensor)))
    if not all(0 < factor < math.inf for factor in factors):
        raise BadModelFileError(f"{gguf.path.name} has RoPE factors that are not positive numbers: use another file.")
    return factors
