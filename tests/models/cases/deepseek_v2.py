"""Variants of DeepSeek V2 beyond its TINY."""

CASES = {
    "greedy, compressed queries, biased": {
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "q_lora_rank": 32,
        "attention_bias": True,
        "mlp_bias": True,
        "first_k_dense_replace": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
