"""One token per sample."""
