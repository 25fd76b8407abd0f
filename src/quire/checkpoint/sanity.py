"""Which values of a model's config are accepted, whichever file they come from.

Called by the readers of config.json and of GGUF, before other code computes with values from an untrusted file.
"""

import math
from typing import Any

from quire.errors import BadModelFileError

# The largest accepted value of each count, far above real models: the builder loops over and multiplies these.
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
    "sliding_window_pattern": 1 << 12,
    "num_kv_heads": 1 << 14,
    "ffn_hidden_size": 1 << 22,
    "num_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "moe_num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "moe_intermediate_size": 1 << 22,
    "q_lora_rank": 1 << 16,
    "kv_lora_rank": 1 << 16,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
}
_POSITIVE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "rope_theta",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
)


def checked(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The config itself; BadModelFileError, which names the `source`, if a value is not acceptable."""
    for key, limit in _LIMITS.items():
        value = config.get(key)
        is_count = type(value) is int and 0 < value <= limit
        if value is not None and not is_count:
            raise BadModelFileError(f"{source} gives {key} as {value!r:.80}, not a whole number from 1 to {limit}.")
    for key in _POSITIVE:
        value = config.get(key)
        if value is not None and not _is_between(value, math.inf):
            raise BadModelFileError(f"{source} gives {key} as {value!r:.80}, not a positive number.")
    for key in ("rope_scaling", "rope_parameters", "quantization_config"):
        if config.get(key) is not None and type(config[key]) is not dict:
            raise BadModelFileError(f"{source} gives {key} as {config[key]!r:.80}, not an object.")
    _check_rope_scaling(config, source)
    _check_layers(config, source)
    num_heads, num_kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if num_heads and num_kv_heads and num_heads % num_kv_heads:
        raise BadModelFileError(f"{source} gives {num_heads} heads, not a multiple of its {num_kv_heads} KV heads.")
    return config


def _check_rope_scaling(config: dict[str, Any], source: str) -> None:
    scaling = config.get("rope_scaling") or {}
    for key in ("factor", "original_max_position_embeddings"):
        value = scaling.get(key)
        if value is not None and not _is_between(value, _LIMITS["max_position_embeddings"]):
            raise BadModelFileError(
                f"{source} gives the {key} of rope_scaling as {value!r:.80}, not a positive number."
            )


def _is_between(value: Any, limit: float) -> bool:
    """A number above zero and below the limit; `type`, because a bool is an int to `isinstance`."""
    return type(value) in (int, float) and 0 < value < limit


def _check_layers(config: dict[str, Any], source: str) -> None:
    full_layers = config.get("max_window_layers")
    is_whole = type(full_layers) is int and full_layers >= 0
    if full_layers is not None and not is_whole:
        raise BadModelFileError(f"{source} gives max_window_layers as {full_layers!r:.80}, not a whole number.")
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if type(layer_types) is not list or len(layer_types) < config.get("num_hidden_layers", 0):
        raise BadModelFileError(f"{source} does not give every layer its own of the layer_types.")
