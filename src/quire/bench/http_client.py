"""A small HTTP client for streams: asyncio, a C parser, almost no copying. One process reads 100,000 events a second.

Used by the load generator and the serving benchmarks, whose own cost must not show in what they measure. Knows
HTTP/1.1 and the server-sent events of OpenAI and Anthropic; not what is asked or why.
"""

import asyncio
import ssl
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from quire.errors import ConfigError

# Servers drop idle connections, usually after five seconds or more: one idle for longer than this is not used again.
IDLE_S = 2.0


class Failure(Exception):
    """A request that got no good answer: `kind` is a word or two by which failures are counted."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


class HttpReply:
    """A response read whole."""

    def __init__(self) -> None:
        self.status = 0
        self.content = b""

    def feed(self, body: bytes, now_s: float) -> None:
        self.content += body

    def message(self) -> str:
        """What the server says is wrong, in OpenAI's error shape or any other."""
        try:
            content = msgspec.json.decode(self.content)
            return str(content.get("error", content).get("message", content))
        except (msgspec.DecodeError, AttributeError):
            return self.content[:200].decode(errors="replace")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class StreamedReply(HttpReply):
    """A response read as a stream of server-sent events: when each piece of text came, and how it ended."""

    last_event = "[DONE]"

    def __init__(self) -> None:
        super().__init__()
        self.rest = b""  # the beginning of a line whose end has not arrived
        self.complete = False
        self.error: str | None = None
        self.texts: list[str] = []
        self.times_s: list[float] = []  # one per event that carried text
        self.usage = _Usage()

    def feed(self, body: bytes, now_s: float) -> None:
        if self.status != 200:
            self.content += body
            return
        lines = (self.rest + body).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError:
            self.error = "bad event"
            return
        if event.error is not None:
            self.error = "error event"
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
            if text:
                self.texts.append(text)
                self.times_s.append(now_s)

    def check(self) -> None:
        """Failure unless the stream ended as it should."""
        if self.status != 200:
            raise Failure(f"http {self.status}", self.message())
        if self.error is not None:
            raise Failure(self.error)
        if not self.complete:
            raise Failure("cut off", f"the stream ended without {self.last_event}")


class _BlockDelta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class _MessageUsage(msgspec.Struct):
    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class _MessageEvent(msgspec.Struct):
    type: str
    delta: _BlockDelta | None = None
    usage: _MessageUsage | None = None


_decode_message_event = msgspec.json.Decoder(_MessageEvent).decode


class MessageReply(StreamedReply):
    """The same in Anthropic's protocol."""

    last_event = "message_stop"

    def _event(self, data: bytes, now_s: float) -> None:
        try:
            event = _decode_message_event(data)
        except msgspec.DecodeError:
            self.error = "bad event"
            return
        if event.type == "message_stop":
            self.complete = True
        elif event.type == "error":
            self.error = "error event"
        if event.usage is not None:
            num_prompt_tokens = event.usage.input_tokens + event.usage.cache_read_input_tokens
            self.usage = _Usage(num_prompt_tokens, event.usage.output_tokens)
        delta = event.delta
        if delta is not None and (text := delta.text or delta.thinking or delta.partial_json):
            self.texts.append(text)
            self.times_s.append(now_s)


class ClientConnection(asyncio.Protocol):
    """One keep-alive connection; one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.reply = HttpReply()  # of the exchange under way
        self.ended: asyncio.Future[None] | None = None
        self.now_s = 0.0  # when the data being parsed arrived
        self.idle_since_s = 0.0
        self.reusable = True

    async def exchange(self, request: bytes, reply: HttpReply) -> None:
        """Sends `request` and feeds its response to `reply`; when this is cancelled, the connection is cut."""
        self.reply = reply
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self.ended
        except BaseException:
            self.reusable = False
            self.transport.abort()
            raise
        self.idle_since_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.now_s = time.monotonic()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(Failure("bad http"))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._end(Failure("disconnected", "the server closed the connection"))

    # What the parser calls.

    def on_headers_complete(self) -> None:
        self.reply.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.reply.feed(body, self.now_s)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self.parser.should_keep_alive()
        self._end(None)

    def _end(self, failure: Failure | None) -> None:
        if self.ended is None or self.ended.done():
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


class HttpClient:
    """Connections to one server.

    `async with HttpClient(url) as client: await client.post(path, body, StreamedReply())`"""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url.rstrip("/").removesuffix("/v1"))
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if url.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{base_url!r} is no server's address: write http://127.0.0.1:8000")
        self.host = host
        self.ssl = ssl.create_default_context() if url.scheme == "https" else None
        self.port = port or (443 if self.ssl else 80)
        self.prefix = url.path
        self.headers = f"Host: {url.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            self.headers += f"Authorization: Bearer {api_key}\r\n"
        self.idle: list[ClientConnection] = []

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self.idle:
            self.idle.pop().transport.close()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    async def get(self, path: str) -> HttpReply:
        return await self._send(f"GET {self.prefix}{path} HTTP/1.1\r\n{self.headers}\r\n".encode(), HttpReply())

    async def post(self, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        body_headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"POST {self.prefix}{path} HTTP/1.1\r\n{self.headers}{body_headers}\r\n"
        return await self._send(head.encode() + body, reply)

    async def _send(self, request: bytes, reply: HttpReply) -> HttpReply:
        connection = await self._connect()
        await connection.exchange(request, reply)
        if connection.reusable:
            self.idle.append(connection)
        else:
            connection.transport.close()
        return reply

    async def _connect(self) -> ClientConnection:
        while self.idle:
            connection = self.idle.pop()
            if connection.reusable and time.monotonic() - connection.idle_since_s < IDLE_S:
                return connection
            connection.transport.close()
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(ClientConnection, self.host, self.port, ssl=self.ssl)
        except OSError as error:
            raise Failure("no connection", f"no server answers at {self.host}:{self.port}") from error
        return connection
