"""Ollama's protocol: /api/chat, /api/generate, /api/tags, /api/show and /api/version, on top of `chat.py`."""
