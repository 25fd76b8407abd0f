"""Variants of Mixtral beyond its TINY."""

CASES = {"no window, tied": {"sliding_window": None, "tie_word_embeddings": True, "num_experts_per_tok": 1}}
