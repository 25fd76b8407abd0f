"""Errors in Ollama's shape: a sentence.

Named by the endpoints of this protocol in the table of `app.py`; what an error is, is decided elsewhere.
"""

from quire.api.server.errors import ErrorForm, Problem


class OllamaError(ErrorForm):
    """As Ollama writes it."""

    error: str

    @classmethod
    def of(cls, problem: Problem, request_id: str) -> "OllamaError":
        return cls(problem.error.message)
