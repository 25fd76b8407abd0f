"""Grammars at work: compiled without holding up the core, followed by a guide per request, made into masks."""
