"""Errors in Anthropic's shape.

Named by the endpoints of this protocol in the table of `app.py`; what an error is, is decided elsewhere.
"""

from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.errors import ErrorForm, Problem

# Anthropic's word for each status; 400 and what is not here are the client's mistake.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


# The client that meets this sends the whole conversation again, as it does to servers without threads.
NO_THREADS = "thread_unsupported_request"


class ErrorCode(msgspec.Struct):
    error_code: str


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET  # where clients go by it


class AnthropicError(ErrorForm, kw_only=True):
    """As Anthropic writes it."""

    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id", b"request-id")

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str

    @classmethod
    def of(cls, problem: Problem, request_id: str) -> "AnthropicError":
        kind = _KINDS.get(problem.status, "invalid_request_error")
        details = ErrorCode(NO_THREADS) if problem.error.code == NO_THREADS else UNSET
        return cls(error=AnthropicErrorDetail(kind, problem.error.message, details), request_id=request_id)
