"""A server that serves the page and says what a scenario tells it to: thinking, calls, hostile text, failures.

The last user message names the scenario. What a real model answers is tested against the real server; this one is for
what a model cannot be made to say.
"""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quire.api.server.ui import HEADERS, assets

MARKDOWN = """## A heading

Some *emphasis*, **strong words**, `code` and ~~struck~~ text, and a [link](https://example.com/page).

1. First
2. Second
   - nested
   - list

| name | value |
| :--- | ---: |
| one | 1 |
| two | 22 |

> A quotation

```python
def greet(name):  # says hello
    return "Hello, " + name
```

The end."""

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

![picture](https://example.com/tracker.png) [bad](javascript:window.hacked=3) [data](data:text/html,hi) [good](https://example.com/)

\u202eright to left override\u202c and \u2066isolate, \u001b[31mred\u001b[0m \u0007bell

```js
let x = 1; /*\u202e } if (isAdmin) \u2066 */ 
</code></pre><script>window.hacked = 4</script>
```

<style>body { display: none }</style> &lt;b&gt; <a href="javascript:alert(1)">x</a>
"""

TABLE_ROWS = 3000
MILLION = 1_000_000


class Stub:
    """What the server was asked, and how it stands."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []  # of chat completions
        self.keys: list[str] = []  # those that may call; none: anyone
        self.num_restarts = 0
        self.num_busy = 0  # times it says 503 before it answers
        self.context_messages = 3  # the scenario "context" refuses more


def text_events(text: str, size: int = 4) -> Iterator[dict[str, Any]]:
    for start in range(0, len(text), size):
        yield {"content": text[start : start + size]}


def thinking() -> Iterator[dict[str, Any]]:
    for word in "First I look at the question. ".split(" "):
        yield {"reasoning": word + " ", "reasoning_content": word + " "}
        time.sleep(0.02)
    yield from text_events("The answer is 42.")


def tool_call() -> Iterator[dict[str, Any]]:
    yield {
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        ]
    }
    for part in ('{"city": ', '"Paris", ', '"days": 2}'):
        yield {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}


def huge_table() -> Iterator[dict[str, Any]]:
    yield {"content": "| a | b | c |\n|---|---|---|\n"}
    for row in range(TABLE_ROWS):
        yield {"content": f"| {row} | **x** | `y` |\n"}


def million() -> Iterator[bytes]:
    """Events of a million tokens, a thousand at a time."""
    words = ["token ", "of ", "**many**, ", "`code` ", "and\n", "more.\n\n", "And ", "so ", "it ", "goes "]
    some = b"".join(_event({"choices": [{"index": 0, "delta": {"content": word}}]}) for word in words * 100)
    return itertools.repeat(some, MILLION // 1000)


def one_long_line() -> Iterator[dict[str, Any]]:
    for _ in range(4000):
        yield {"content": "x[*_`(~" * 20}


def slowly() -> Iterator[dict[str, Any]]:
    for idx in range(600):
        yield {"content": f"word{idx} "}
        time.sleep(0.02)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "StubServer"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = "index.html" if self.path == "/" else self.path.removeprefix("/ui/")
        if name in assets():
            asset = assets()[name]
            return self.reply(
                200, asset.body, asset.content_type.decode(), [(k.decode(), v.decode()) for k, v in HEADERS]
            )
        stub = self.server.stub
        if self.path == "/live":
            return self.json({"status": "ok"})
        if not self.may_call():
            return
        if self.path == "/v1/models":
            return self.json({"data": [{"id": "stub-model", "max_model_len": 4096}]})
        if self.path == "/metrics":
            return self.reply(
                200, b'quire:engine_restarts_total{reason="own"} %d.0\n' % stub.num_restarts, "text/plain"
            )
        self.error(404, "not_found", "There is no such path.")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.may_call():
            return
        if self.path == "/api/show":
            return self.json({"parameters": "temperature 0.2\ntop_p 0.9"})
        stub = self.server.stub
        stub.bodies.append(body)
        if stub.num_busy:
            stub.num_busy -= 1
            return self.error(503, "not_ready", "the engine is starting", [("Retry-After", "1")])
        self.answer(body)

    def may_call(self) -> bool:
        keys = self.server.stub.keys
        if not keys or self.headers.get("Authorization", "").removeprefix("Bearer ") in keys:
            return True
        self.error(401, "invalid_api_key", "the API key is missing or wrong")
        return False

    def answer(self, body: dict[str, Any]) -> None:
        scenario = next((m["content"] for m in reversed(body["messages"]) if m["role"] == "user"), "")
        stub = self.server.stub
        if scenario == "context" and len(body["messages"]) > stub.context_messages:
            return self.error(400, "context_length_exceeded", "the prompt has 5,000 tokens, the context 4,096.")
        if scenario == "million":
            return self.stream_raw(million())
        if body["messages"][-1]["role"] == "tool":
            events = text_events(f"The tool said: {body['messages'][-1]['content']}")
        else:
            known = {
                "thinking": thinking, "tool": tool_call, "table": huge_table, "line": one_long_line,
                "slow": slowly, "break": slowly, "restart": self.restarting,
                "markdown": lambda: text_events(MARKDOWN), "hostile": lambda: text_events(HOSTILE, 7),
            }  # fmt: skip
            events = known.get(scenario, lambda: text_events(f"You said: {scenario}"))()
        self.stream(body, events, cut_after=20 if scenario == "break" else None)

    def restarting(self) -> Iterator[dict[str, Any]]:
        yield from text_events("Before the crash, ")
        time.sleep(2.5)
        self.server.stub.num_restarts += 1
        yield from text_events("and after it.")

    def start_stream(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def stream_raw(self, parts: Iterator[bytes]) -> None:
        self.start_stream()
        try:
            for part in parts:
                self.wfile.write(part)
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass

    def stream(self, body: dict[str, Any], deltas: Iterator[dict[str, Any]], cut_after: int | None) -> None:
        self.start_stream()
        num = 0
        batch: list[bytes] = []
        try:
            for num, delta in enumerate(itertools.islice(deltas, cut_after), 1):
                logprobs = _logprobs(delta) if body.get("logprobs") else None
                choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
                batch.append(_event({"model": "stub-model", "choices": [choice]}))
                if len(batch) >= 50 or num < 1000:
                    self.wfile.write(b"".join(batch))
                    batch = []
            self.wfile.write(b"".join(batch))
            if cut_after is None:
                reason = "tool_calls" if num and "tool_calls" in delta else "stop"
                self.wfile.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))
                usage = {"prompt_tokens": 40, "completion_tokens": num, "prompt_tokens_details": {"cached_tokens": 32}}
                self.wfile.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass

    def reply(self, status: int, body: bytes, content_type: str, headers: list[tuple[str, str]] = []) -> None:
        self.send_response(status)
        for name, value in [("Content-Type", content_type), ("Content-Length", str(len(body))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), "application/json")

    def error(self, status: int, code: str, message: str, headers: list[tuple[str, str]] = []) -> None:
        body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
        self.reply(status, json.dumps(body).encode(), "application/json", headers)


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _logprobs(delta: dict[str, Any]) -> dict[str, Any]:
    token = delta.get("content", "")
    top = [{"token": token, "logprob": -0.2}, {"token": "other", "logprob": -1.9}]
    return {"content": [{"token": token, "logprob": -0.2, "top_logprobs": top}]}


class StubServer(ThreadingHTTPServer):
    daemon_threads = True
    stub: Stub

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def hang_up(self) -> None:
        """A browser would go on over a connection that it has kept."""
        for connection in self.connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(port: int = 0) -> Iterator[tuple[str, Stub]]:
    server = StubServer(("127.0.0.1", port), Handler)
    server.stub = Stub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.stub
    finally:
        server.shutdown()
        server.server_close()
        server.hang_up()
