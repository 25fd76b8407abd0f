"""Variants of Granite-MoE beyond its TINY."""

CASES = {"biased, untied": {"attention_bias": True, "tie_word_embeddings": False}}
