"""Published formats of weights back to floats."""
