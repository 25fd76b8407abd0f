"""Output with a shape: what a request asks for becomes a grammar, and a grammar becomes masks over the vocabulary.

`spec.py` is what requests carry; `compiler.py` is what the core uses; one file per engine.
"""
