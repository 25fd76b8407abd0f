"""Variants of MiniMax M2 beyond its TINY."""

CASES = {"heads rotate whole, tied": {"rotary_dim": None, "tie_word_embeddings": True}}
