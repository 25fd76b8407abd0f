"""Variants of Qwen2-MoE beyond its TINY."""

CASES = {
    "no window": {"use_sliding_window": False},
    "every other layer, normalised, no biases": {
        "decoder_sparse_step": 2,
        "mlp_only_layers": None,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}
