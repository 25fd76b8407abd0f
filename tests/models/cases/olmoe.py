"""Variants of OLMoE beyond its TINY."""

CASES = {"not clipped, normalised, biased": {"clip_qkv": None, "norm_topk_prob": True, "attention_bias": True}}
