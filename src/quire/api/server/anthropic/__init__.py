"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens, on top of what `chat.py` does."""
