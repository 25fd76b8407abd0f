"""Variants of DeepSeek V3 beyond its TINY."""

CASES = {
    "one group, not normalised, halves rotate, queries not compressed": {
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
    },
}
