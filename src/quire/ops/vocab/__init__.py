"""Reductions over a vocabulary."""
