"""Variants of Gemma 4 beyond its TINY."""

CASES = {
    "experts, keys are values, all layers with a cache, nothing per layer": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    },
}
