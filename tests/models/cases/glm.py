"""Variants of GLM beyond its TINY."""

CASES = {"no biases, tied": {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0}}
