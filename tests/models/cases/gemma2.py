"""Variants of Gemma 2 beyond its TINY."""

CASES = {
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "two windows": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "biased, untied": {"attention_bias": True, "tie_word_embeddings": False},
}
