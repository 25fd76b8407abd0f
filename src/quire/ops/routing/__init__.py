"""Which experts a token goes to."""
