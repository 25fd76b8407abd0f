"""Variants of OLMo 3 beyond its TINY."""

CASES = {
    "other windows": {
        "rope_scaling": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}
