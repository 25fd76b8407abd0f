"""Structured output: what a request asks for becomes a grammar, and a grammar becomes masks over the vocabulary.

`spec.py` is what requests carry; `grammars/` turns schemas and patterns into grammars; `engines/` has a file per
grammar library; `running/` is what the core uses.
"""
