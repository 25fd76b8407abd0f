"""Variants of MiniCPM 3 beyond its TINY."""

CASES = {
    "unscaled, queries not compressed": {
        "q_lora_rank": None,
        "v_head_dim": None,
        "scale_depth": None,
        "dim_model_base": None,
        "tie_word_embeddings": False,
        "mlp_bias": True,
    },
}
