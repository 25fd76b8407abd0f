"""Norms, gated activations, lookups, and all that happens to q, k and v before attention."""
