"""Variants of Qwen2 beyond its TINY."""

CASES = {
    "no window": {"use_sliding_window": False, "tie_word_embeddings": True},
    "window in some layers": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}
