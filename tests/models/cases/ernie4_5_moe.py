"""Variants of ERNIE 4.5 MoE beyond its TINY."""

CASES = {
    "biased, untied, nothing shared, every other layer": {
        "use_bias": True,
        "tie_word_embeddings": False,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 2,
    },
}
