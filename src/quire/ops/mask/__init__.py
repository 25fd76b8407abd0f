"""Grammar masks over logits."""
