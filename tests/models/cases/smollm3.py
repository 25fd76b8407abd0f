"""Variants of SmolLM3 beyond its TINY."""

CASES = {
    "positions in named layers": {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False},
    "a window where there are no positions": {"use_sliding_window": True, "sliding_window": 24},
    "biased, yarn": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}
