"""Variants of Cohere 2 beyond its TINY."""

CASES = {"untied, biased": {"tie_word_embeddings": False, "attention_bias": True}}
