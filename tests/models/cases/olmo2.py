"""Variants of OLMo 2 beyond its TINY."""

CASES = {"tied, biased": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4}}
