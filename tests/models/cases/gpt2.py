"""Variants of GPT-2 beyond its TINY."""

CASES = {
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "n_inner": None},
    "unscaled, untied": {"scale_attn_weights": False, "tie_word_embeddings": False, "activation_function": "relu"},
}
