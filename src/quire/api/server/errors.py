"""Exceptions as HTTP answers: one table from our exception tree to status, type and code, written as OpenAI does.

Used by `app.py` and the guard for whole answers and by `sse.py` for streams that broke. A protocol with errors of
another form has a class like `ErrorBody`, which its endpoints name in the table of `app.py`. The answer to an exception
that is not in the table says nothing but the request's id.
"""

import logging
import math
from typing import ClassVar

import msgspec

from quire.errors import (
    DeadlineError,
    EngineError,
    InternalError,
    OverloadedError,
    PoisonError,
    RateLimitedError,
    RequestError,
    TooLongError,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 400
NO_RETRY = (b"x-should-retry", b"false")  # the openai client honours it; trying again would only cost more


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Problem(msgspec.Struct):
    """An error, ready to be sent."""

    status: int
    error: ErrorDetail
    headers: list[tuple[bytes, bytes]] = []


class ErrorForm(msgspec.Struct):
    """The body of an error as a protocol writes it: a struct that can be made of any problem."""

    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)  # of every answer, not of errors alone

    @classmethod
    def of(cls, problem: Problem, request_id: str) -> "ErrorForm":
        raise NotImplementedError

    @classmethod
    def encode(cls, problem: Problem, request_id: str) -> bytes:
        return msgspec.json.encode(cls.of(problem, request_id))


class ErrorBody(ErrorForm):
    """As OpenAI writes it."""

    error: ErrorDetail

    @classmethod
    def of(cls, problem: Problem, request_id: str) -> "ErrorBody":
        return cls(problem.error)


class Refused(Exception):
    """Ends a call before its endpoint, with a problem for an answer. `hint`: the flag to change, for the log.
    `body_read`: all of its body, where there is one, was received."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        kind: str = "invalid_request_error",
        hint: str = "",
        body_read: bool = False,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, ErrorDetail(message, kind, code=code))
        self.hint = hint
        self.body_read = body_read


def problem(error: Exception, request_id: str) -> Problem:
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:  # some messages repeat what was sent
        message = message[:MAX_MESSAGE_CHARS] + "…"
    match error:
        case UnknownModelError():
            return Problem(404, ErrorDetail(message, "invalid_request_error", "model", "model_not_found"))
        case TooLongError():
            detail = ErrorDetail(message, "invalid_request_error", error.param, "context_length_exceeded")
            return Problem(400, detail)
        case RequestError():
            code = error.code or ("invalid_value" if error.param else None)
            return Problem(400, ErrorDetail(message, "invalid_request_error", error.param, code))
        case OverloadedError():
            wait = (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))
            return Problem(503, ErrorDetail(message, "overloaded_error", code="overloaded"), [wait])
        case RateLimitedError():
            wait = (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))
            return Problem(429, ErrorDetail(message, "rate_limit_error", code="rate_limit_exceeded"), [wait])
        case DeadlineError():
            return Problem(408, ErrorDetail(message, "timeout_error", code="deadline_exceeded"), [NO_RETRY])
        case PoisonError() | InternalError():
            return Problem(500, ErrorDetail(message, "server_error", code="request_failed"), [NO_RETRY])
        case EngineError():
            return Problem(503, ErrorDetail(message, "server_error", code="engine_unavailable"))
    log.error("request %s failed", request_id, exc_info=error)
    unforeseen = f"internal error; the server's log has more under request id {request_id}"
    return Problem(500, ErrorDetail(unforeseen, "server_error"))


def no_such_path() -> Problem:
    message = "there is no such path: /docs lists those there are"
    return Problem(404, ErrorDetail(message, "invalid_request_error", code="not_found"))


def wrong_method(allowed: list[str]) -> Problem:
    names = ", ".join(allowed)
    detail = ErrorDetail(f"this path takes {names} only", "invalid_request_error", code="method_not_allowed")
    return Problem(405, detail, [(b"allow", names.encode())])
