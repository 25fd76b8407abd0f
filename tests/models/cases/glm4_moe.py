"""Variants of GLM-4.5 beyond its TINY."""

CASES = {
    "one group, not normalised, plain heads": {
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "use_qk_norm": False,
        "attention_bias": False,
        "first_k_dense_replace": 0,
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "n_shared_experts": 2,
    },
}
