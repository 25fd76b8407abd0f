"""Copies of KV blocks."""
