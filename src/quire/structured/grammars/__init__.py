"""Grammars from JSON schemas and regular expressions."""
