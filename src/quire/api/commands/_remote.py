"""Answers from a server that speaks OpenAI's protocol, ours or another: for `quire chat --base-url`.

Plain `http.client`: no redirects are followed, so that a key goes to the server it was meant for and no other.
"""

import http.client
import ssl
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.api.commands._talk import Messages, Show
from quire.errors import ConfigError, EngineError, RequestError

_CONNECT_S = 10.0
_ANSWER_S = 600.0  # without a byte
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 16


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class RemoteModel:
    """One model of one server; `fields` go into every request."""

    def __init__(self, base_url: str, api_key: str | None, model: str | None, fields: dict[str, Any]) -> None:
        url = urlsplit(base_url)
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if url.scheme not in ("http", "https") or not host or url.query or url.fragment:
            raise ConfigError(f"{base_url!r:.200} is no server's address: write http://127.0.0.1:8000/v1")
        self._host, self._port, self._is_tls = host, port, url.scheme == "https"
        self._prefix = url.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("the key has characters that no header can hold: check it")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()
        self._fields = fields

    def answer(self, messages: Messages, show: Show) -> None:
        body = {"model": self.model, "messages": messages, "stream": True, **self._fields}
        with closing(self._connected()) as connection:
            response = self._ask(connection, "POST", "/chat/completions", msgspec.json.encode(body))
            for event in _events(response):
                if event.error is not None:
                    raise RequestError(f"the server ends the answer: {_message(msgspec.json.encode(event.error))}")
                for choice in event.choices[:1]:
                    if thought := choice.delta.reasoning_content or choice.delta.reasoning:
                        show(thought, True, 1)  # a token, as a rule
                    if choice.delta.content:
                        show(choice.delta.content, False, 1)

    def _first_model(self) -> str:
        with closing(self._connected()) as connection:
            raw = self._ask(connection, "GET", "/models", None).read(_MAX_LINE_BYTES)
        try:
            return msgspec.json.decode(raw, type=_Models).data[0].id
        except (msgspec.DecodeError, IndexError):
            raise ConfigError("the server lists no models: name one, as in quire chat MODEL --base-url URL") from None

    def _connected(self) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=_CONNECT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_S)
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise EngineError(f"no server answers at {self._host} ({why}): check --base-url") from None
        if response.status == 200:
            return response
        said = _message(response.read(_MAX_ERROR_BYTES))
        if response.status == 401:
            raise RequestError(f"the server wants a key: give --api-key or set OPENAI_API_KEY ({said})")
        raise RequestError(f"the server answers {response.status}: {said}")


def _events(response: http.client.HTTPResponse) -> Iterator[_Event]:
    """Up to [DONE]."""
    try:
        while line := response.readline(_MAX_LINE_BYTES):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError:
        raise RequestError("the server sends events that are not OpenAI's: check --base-url") from None
    except (OSError, http.client.HTTPException):
        raise EngineError("the server broke the answer off: ask again") from None
    raise EngineError("the server broke the answer off: ask again")


def _message(raw: bytes) -> str:
    """What the server says is wrong, in OpenAI's error shape or any other; one short line."""
    try:
        content = msgspec.json.decode(raw)
        if isinstance(content, dict):
            content = content.get("error", content)
        if isinstance(content, dict):
            content = content.get("message", content)
        said = str(content)
    except msgspec.DecodeError:
        said = raw.decode(errors="replace")
    return "".join(each if each.isprintable() else " " for each in said[:300]).strip() or "nothing more"
