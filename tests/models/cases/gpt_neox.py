"""Variants of GPT-NeoX beyond its TINY."""

CASES = {
    "sequential, tied, linear": {
        "use_parallel_residual": False,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "no bias, all of a head rotates": {"attention_bias": False, "rotary_pct": 1.0, "rotary_emb_base": 500.0},
}
