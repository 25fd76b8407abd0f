"""Linear layers with weights in 16 or 32 bits."""
