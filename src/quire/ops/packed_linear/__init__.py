"""Linear layers with weights packed in 4, 8 or 16 bits."""
