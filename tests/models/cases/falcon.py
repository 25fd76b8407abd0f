"""Variants of Falcon beyond its TINY."""

CASES = {
    "as 7B": {"new_decoder_architecture": False, "num_kv_heads": 4, "ffn_hidden_size": None},
    "as 11B": {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "rope_theta": 500042.0},
    "old, all heads": {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4, "bias": True},
    "old, sequential": {"new_decoder_architecture": False, "num_kv_heads": 4, "parallel_attn": False},
}
