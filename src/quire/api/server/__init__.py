"""The OpenAI-compatible HTTP server: `app.py` has the table of endpoints, one file per family of them beside it."""
