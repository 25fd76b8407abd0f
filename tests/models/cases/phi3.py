"""Variants of Phi-3 beyond its TINY. What only config.json files can say is in test_longrope.py."""

CASES = {
    "without scaling": {"rope_scaling": None, "partial_rotary_factor": 1.0, "sliding_window": None},
    "tied": {"tie_word_embeddings": True},
    # Every request ends past the trained length, so transformers, too, takes the list for long contexts.
    "long contexts": {"original_max_position_embeddings": 64},
}
