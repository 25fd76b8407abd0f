"""Variants of StarCoder2 beyond its TINY."""

CASES = {"no window, no biases, untied": {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False}}
