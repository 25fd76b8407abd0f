"""Variants of Granite beyond its TINY."""

CASES = {"biased, untied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}}
