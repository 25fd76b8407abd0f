"""The experts of a mixture."""
