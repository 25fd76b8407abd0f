"""Variants of Gemma 3 beyond its TINY."""

CASES = {
    "five of six": {"layer_types": None, "rope_parameters": None, "num_hidden_layers": 7},
    "capped, untied": {"final_logit_softcapping": 8.0, "tie_word_embeddings": False, "attention_bias": True},
}
