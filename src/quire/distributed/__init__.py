"""Several processes that compute one model together: what they exchange, and one file per way to exchange it."""
