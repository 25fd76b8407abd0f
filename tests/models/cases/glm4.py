"""Variants of GLM-4-0414 beyond its TINY."""

CASES = {
    "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}
