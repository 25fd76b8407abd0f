"""What a handler is given and gives back: the service, one call of it, and whole answers (streams are `sse.py`'s).

Used by every handler. Knows ASGI and AsyncLLM, no protocol and no endpoint.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.api.server.errors import ErrorBody, ErrorForm, Problem, UnknownModelError
from quire.api.server.live_feed import LiveFeeds
from quire.api.server.logs import CallRecord
from quire.frontend.async_llm import AsyncLLM, Stream

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"
PIECE_BYTES = 1 << 18  # of a large answer, sent at once
PIECE_ENTRIES = 1024  # of a long list, encoded at once


@dataclass(frozen=True)
class Service:
    """What all calls share."""

    llm: AsyncLLM
    names: list[str]  # of the model; the first is used where a request names none
    openapi: dict[str, Any]  # the document
    fingerprint: str = ""  # of the model as it runs here
    started_s: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def live(self) -> LiveFeeds:
        """What those who watch the engine are shown."""
        return LiveFeeds(self.llm, self.names[0], self.started_s)

    def model_name(self, asked: str | None) -> str:
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise UnknownModelError(f"there is no model {asked!r:.200} here: {', '.join(self.names)} can be asked for")
        return asked


@dataclass(slots=True)
class Call:
    """One HTTP request, its body read."""

    service: Service
    record: CallRecord
    receive: Receive
    body: bytes = b""
    argument: str = ""  # what `{…}` in the endpoint's path stood for
    query: dict[str, str] = field(default_factory=dict)
    headers: Sequence[tuple[bytes, bytes]] = ()
    errors: type[ErrorForm] = ErrorBody  # how its endpoint writes errors
    own_id: str | None = None  # the id that the body asks for
    created_s: int = field(default_factory=lambda: int(time.time()))
    streams: list[Stream] = field(default_factory=list)  # what it asked of the engine

    @property
    def request_id(self) -> str:
        return self.own_id or self.record.request_id

    def head(self, prefix: str, model_name: str) -> dict[str, Any]:
        """What every answer and every event of an answer begins with, in OpenAI's protocol."""
        fingerprint = self.service.fingerprint
        answer_id = self.answer_id(f"{prefix}-")
        return {"id": answer_id, "created": self.created_s, "model": model_name, "system_fingerprint": fingerprint}

    def answer_id(self, prefix: str) -> str:
        answer_id = prefix + self.request_id
        if self.record.trace is not None:
            self.record.trace.answers(answer_id)
        return answer_id

    def core_id(self) -> str:
        """A new id for the core, in which no two requests may have the same."""
        return f"{self.request_id}-{secrets.token_hex(4)}"

    def abort(self) -> None:
        """Ends the streams that still run for this call."""
        for stream in self.streams:
            stream.abort()  # does nothing to a finished one


class Answer:
    """A whole answer: called with the client's `receive` and `send`, as every answer is."""

    def __init__(self, *body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers = []) -> None:
        """`body`: one piece or several."""
        self.body = body
        self.status = status
        size = sum(map(len, body))
        self.headers: Headers = [(b"content-type", content_type), (b"content-length", b"%d" % size), *headers]

    @classmethod
    def json(cls, value: Any, status: int = 200) -> "Answer":
        return cls(msgspec.json.encode(value), status=status)

    @classmethod
    def large_json(cls, value: Any) -> "Answer":
        """Encoded in pieces: encoding all of it in a single call would let no other thread run meanwhile."""
        bodies: list[bytes] = []
        pieces: list[bytes] = []
        size = 0
        for piece in json_pieces(value):
            pieces.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES:
                bodies.append(b"".join(pieces))
                pieces, size = [], 0
        return cls(*bodies, b"".join(pieces))

    @classmethod
    def error(cls, problem: Problem, form: type[ErrorForm] = ErrorBody, request_id: str = "") -> "Answer":
        return cls(form.encode(problem, request_id), status=problem.status, headers=problem.headers)

    async def __call__(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for piece in self.body[:-1]:
            await send_body(send, piece, more=True)
            await asyncio.sleep(0)
        await send_body(send, self.body[-1], more=False)


async def send_body(send: Send, body: bytes, more: bool) -> None:
    """Sends part of an answer's body, in pieces where it is large. `more`: other parts will follow."""
    last = max(0, (len(body) - 1) // PIECE_BYTES * PIECE_BYTES)
    for start in range(0, last, PIECE_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": body[last:], "more_body": more})


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a struct, each long list in it a few entries at a time."""
    encode = msgspec.json.encode
    if isinstance(value, msgspec.Struct):
        before = b"{"
        for name, inner in zip(value.__struct_encode_fields__, msgspec.structs.astuple(value)):
            if inner is not msgspec.UNSET:
                yield before + encode(name) + b":"
                yield from json_pieces(inner)
                before = b","
        yield b"}" if before == b"," else b"{}"
    elif _is_list_of_structs(value):
        for idx, inner in enumerate(value):
            yield b"," if idx else b"["
            yield from json_pieces(inner)
        yield b"]"
    elif isinstance(value, list) and len(value) > PIECE_ENTRIES:
        for start in range(0, len(value), PIECE_ENTRIES):
            yield (b"," if start else b"[") + encode(value[start : start + PIECE_ENTRIES])[1:-1]
        yield b"]"
    else:
        yield encode(value)


def _is_list_of_structs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], msgspec.Struct)


async def read_body(receive: Receive) -> bytes | None:
    """The whole body, whose size the guard bounds; None if the client disconnected while sending it."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return message.get("body", b"")
    parts = []
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    return None


class AbortOnDisconnect:
    """`async with AbortOnDisconnect(receive, streams)`: a disconnect or the end of the block ends the streams."""

    def __init__(self, receive: Receive, streams: Sequence[Stream]) -> None:
        self.receive = receive
        self.streams = streams

    async def __aenter__(self) -> None:
        self.watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, *exception: object) -> None:
        self.watcher.cancel()
        # Its CancelledError refers back to this object: that cycle would keep the request until the next collection.
        del self.watcher
        self._abort()

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self) -> None:
        for stream in self.streams:
            stream.abort()  # does nothing to a finished one
