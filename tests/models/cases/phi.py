"""Variants of Phi beyond its TINY."""

CASES = {
    "normed heads": {"qk_layernorm": True, "head_dim": 16},
    "as phi-2": {
        "hidden_size": 160,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 80,
        "partial_rotary_factor": 0.4,
    },
    "tied, linear": {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
