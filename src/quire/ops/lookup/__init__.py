"""Where the end of a text occurred before, and what followed there."""
