"""Checks every call before its endpoint: who may call and how much they may send; gives it a request id and a log line.

A plain ASGI middleware that `run.py` puts around the app. Denies by default: a path that the table of endpoints
(`policy_of`) does not have needs a key like any other. Knows nothing of models, and passes the messages of a stream on
unchanged.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quire.api.server import logs
from quire.api.server.errors import ErrorBody, ErrorForm, Problem, Refused, problem
from quire.api.server.json_cost import CHEAP_BYTES, MAX_NUMBER_CHARS, json_cost
from quire.api.server.keys import Keys, Policy
from quire.api.server.tracing import Tracer
from quire.config.server import ServerConfig
from quire.errors import RateLimitedError

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADER_BYTES = 32 << 10
CLIENT_GONE = 499  # status in the log of a call whose client disconnected before it got one
# How long and how much of a refused body is read and dropped.
LINGER_S = 2.0
LINGER_BYTES = 64 << 20

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# Headers that a request may have only once.
_ONCE = frozenset(b"authorization content-length content-type host transfer-encoding x-api-key x-request-id".split())


# What a browser that was not led here by a foreign name says in Host, with or without a port.
_LOCAL_HOST = re.compile(rb"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]*)?", re.IGNORECASE)


class ClientGone(Exception):
    """The client disconnected while sending."""


def _count_nothing(method: str, path: str, status: int) -> None:
    pass


def _as_openai(path: str) -> type[ErrorForm]:
    return ErrorBody


class Guard:
    def __init__(
        self,
        app: App,
        policy_of: Callable[[str, str], Policy | None],
        config: ServerConfig,
        count: Callable[[str, str, int], None] = _count_nothing,
        errors_of: Callable[[str], type[ErrorForm]] = _as_openai,
        tracer: Tracer | None = None,
    ) -> None:
        """`count` is told method, path and status of every call. `errors_of` says how errors are written at a path."""
        self.app = app
        self.policy_of = policy_of
        self.config = config
        self.count = count
        self.errors_of = errors_of
        self.tracer = tracer
        self.root_path = config.root_path.rstrip("/")
        self.keys = Keys(config)
        self.cors = Cors(config.allowed_origins)
        self.hosts = Hosts(config)
        self.held = HeldBytes(config.max_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:  # no endpoint speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        if self.root_path and scope["path"].startswith(self.root_path + "/"):
            scope["path"] = scope["path"][len(self.root_path) :]
        client = scope.get("client")
        address = client[0] if client else ""
        record = logs.CallRecord(request_id.decode(), scope["method"], scope["path"], address)
        scope.setdefault("state", {})["record"] = record
        reply = Reply(send, self.cors.headers(headers), self.errors_of(scope["path"]), record.request_id)
        policy = self.policy_of(scope["method"], scope["path"])
        share = self.held.share(address)
        try:
            await self._answer(scope, headers, policy, receive, reply, share)
        except ClientGone:
            pass
        except Refused as refused:
            record.failed(refused.problem.error, refused.hint)
            is_unread = _has_body(headers) and not refused.body_read
            await reply.problem(refused.problem, unread=receive if is_unread else None)
        except RateLimitedError as error:
            limited = problem(error, record.request_id)
            record.failed(limited.error)
            await reply.problem(limited, unread=receive if _has_body(headers) else None)
        except Exception as error:
            unforeseen = problem(error, record.request_id)
            record.failed(unforeseen.error)
            if not reply.status:  # else the answer has begun: it ends early, and the client sees that
                await reply.problem(unforeseen)
        finally:
            share.give_back()
            if record.limits is not None:
                record.limits.settle(record.usage().total_tokens if record.usage is not None else 0)
            record.status = reply.status or CLIENT_GONE
            record.seconds = time.perf_counter() - started
            self.count(record.method, record.path, record.status)
            if record.trace is not None:
                record.trace.end(record)
            is_probe = policy == "open" and reply.status in (200, 503)  # these come every second
            if self.config.access_log and not is_probe:
                logs.write_call(record)

    async def _answer(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        policy: Policy | None,
        receive: Receive,
        reply: "Reply",
        share: "Share",
    ) -> None:
        """Checks the call, and passes it on to its endpoint with all of its body."""
        check_head(scope["headers"])
        self.hosts.check(headers)
        if self.cors.is_preflight(scope, headers):
            await self.cors.preflight(headers, reply)
            return
        record: logs.CallRecord = scope["state"]["record"]
        caller = self.keys.check(policy, headers)
        record.owner, record.label = caller.owner, caller.label
        if self.tracer is not None:
            reply.headers += self.tracer.start(record, scope["headers"])
        if caller.limits is not None:
            record.limits = caller.limits.start_call()
        if _has_body(headers):
            body = await self._body(headers, receive, share)
            receive = replay(body, receive)
            record.body = body if self.config.log_requests else None
        await self.app(scope, receive, reply.send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, share: "Share") -> bytes:
        """The whole body, within the limits of size, time, depth and number of values."""
        limit = self.config.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        too_large = f"the body is larger than {limit:,} bytes: send less"
        hint = "--max-body-bytes"
        is_sane_length = declared.isdigit() and len(declared) <= 15
        if not is_sane_length or int(declared) > limit:
            raise Refused(413, "body_too_large", too_large, hint=hint)
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) + len(part) > limit:
                        raise Refused(413, "body_too_large", too_large, hint=hint, body_read=not more)
                    if not share.hold(len(part)):
                        full = "the bodies of the requests under way take all the memory there is for them"
                        text, flag = f"{full}: try again later", "--max-held-bytes"
                        raise Refused(503, "overloaded", text, "overloaded_error", flag, body_read=not more)
                    body += part
        except TimeoutError:
            limit_s = self.config.body_timeout_s
            text = f"the body did not arrive within {limit_s:g} s: send faster"
            raise Refused(408, "body_timeout", text, "timeout_error", "--body-timeout-s") from None
        # A web page can send other types to a server on its visitor's machine without a CORS preflight, but not JSON.
        if body and headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            text = "the body must be JSON: send it with Content-Type: application/json"
            raise Refused(415, "unsupported_media_type", text, body_read=True)
        await self._check_cost(body)
        return bytes(body)

    async def _check_cost(self, body: bytearray) -> None:
        """Refuses JSON that would take long to decode: decoding cannot be interrupted."""
        max_depth, max_values = self.config.max_json_depth, self.config.max_json_values
        if len(body) <= CHEAP_BYTES and body.count(b"[") + body.count(b"{") <= max_depth:
            return
        cost = await json_cost(body)
        if cost.max_depth > max_depth:
            text = f"the body nests lists and objects deeper than {max_depth}: flatten it"
            raise Refused(400, "json_too_deep", text, hint="--max-json-depth", body_read=True)
        if cost.num_values > max_values:
            text = f"the body's JSON holds more than {max_values:,} values: send less"
            raise Refused(400, "json_too_large", text, hint="--max-json-values", body_read=True)
        if cost.has_long_number:
            text = f"the body holds a number of more than {MAX_NUMBER_CHARS} characters: shorten it"
            raise Refused(400, "number_too_long", text, body_read=True)


class Reply:
    """Sends the answer to the client: remembers its status, and adds headers to its start, the request's id too."""

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], errors: type[ErrorForm], request_id: str
    ) -> None:
        """`errors`: how they are written."""
        self._send = send
        self.headers = [*((name, request_id.encode()) for name in errors.id_headers), *headers]
        self.errors = errors
        self.request_id = request_id
        self.status = 0  # nothing sent yet

    def send(self, message: Message) -> Awaitable[None]:
        """The `send` that the app is given. Called once per token, so it is not a coroutine itself, to save time."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        return self._send(message)

    async def problem(self, problem: Problem, unread: Receive | None = None) -> None:
        """Answers at once. `unread`: a body is still arriving, which is read and dropped for a while before the
        connection is closed. Closing earlier would reset the connection, and a client that sends everything before it
        reads would never see the answer."""
        body = self.errors.encode(problem, self.request_id)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *problem.headers]
        if problem.status == 401:
            head.append((b"www-authenticate", b"Bearer"))
        if unread:
            head.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": problem.status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": unread is not None})
        if unread:
            await drop(unread)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class HeldBytes:
    """Bounds the memory of the bodies of calls under way: all together, and those of one address to half of that."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def share(self, address: str) -> "Share":
        return Share(self, address)


class Share:
    """What one call takes of `HeldBytes`."""

    def __init__(self, held: HeldBytes, address: str) -> None:
        self.held = held
        self.address = address
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> bool:
        """Takes so many bytes more; False where there are not enough left.

        The only body of an address may take more than the address's half: it has a limit of its own."""
        held = self.held
        held_by_address = held.by_address[self.address]
        is_only_body = held_by_address == self.num_bytes
        if held.total + num_bytes > held.limit:
            return False
        if held_by_address + num_bytes > held.limit // 2 and not is_only_body:
            return False
        held.total += num_bytes
        held.by_address[self.address] += num_bytes
        self.num_bytes += num_bytes
        return True

    def give_back(self) -> None:
        held = self.held
        held.total -= self.num_bytes
        held.by_address[self.address] -= self.num_bytes
        if not held.by_address[self.address]:
            del held.by_address[self.address]
        self.num_bytes = 0


class Hosts:
    """Refuses calls by foreign names to a server that only this machine reaches: a page of another site, whose name an
    attacker has led to 127.0.0.1 (DNS rebinding), could else read answers in a visitor's browser."""

    def __init__(self, config: ServerConfig) -> None:
        self.is_checked = config.is_local and "*" not in config.allowed_hosts
        self.names = {host.lower().encode() for host in config.allowed_hosts}

    def check(self, headers: dict[bytes, bytes]) -> None:
        if not self.is_checked:
            return
        host = headers.get(b"host")  # every browser sends it
        if not host or _LOCAL_HOST.fullmatch(host) or host.partition(b":")[0].lower() in self.names:
            return
        text = "this server is not known by the name in the Host header: start it with --allowed-hosts NAME to allow it"
        raise Refused(403, "host_not_allowed", text, "permission_error", hint="--allowed-hosts")


class Cors:
    """Answers browsers that ask whether a page of another origin may call; not at all without allowed origins."""

    def __init__(self, origins: list[str]) -> None:
        self.any = "*" in origins
        self.origins = {origin.encode() for origin in origins}

    def headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        if not self.origins:
            return []
        vary = (b"vary", b"Origin")
        origin = headers.get(b"origin")
        is_allowed = self.any or origin in self.origins
        if origin is None or not is_allowed:
            return [vary]
        allowed = b"*" if self.any else origin
        return [vary, (b"access-control-allow-origin", allowed), (b"access-control-expose-headers", b"X-Request-Id")]

    def is_preflight(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        asks = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        return asks and bool(self.origins)

    async def preflight(self, headers: dict[bytes, bytes], reply: Reply) -> None:
        allowed = self.any or headers.get(b"origin") in self.origins
        head = [(b"content-length", b"0")]
        if allowed:
            asked = headers.get(b"access-control-request-headers", b"authorization, content-type")
            head += [
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (b"access-control-allow-headers", asked),
                (b"access-control-max-age", b"600"),
            ]
        await reply.send({"type": "http.response.start", "status": 200 if allowed else 403, "headers": head})
        await reply.send({"type": "http.response.body", "body": b""})


def check_head(headers: Sequence[tuple[bytes, bytes]]) -> None:
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise Refused(431, "headers_too_large", f"the headers are larger than {MAX_HEADER_BYTES:,} bytes: send less")
    names = [name for name, _ in headers if name in _ONCE]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0].decode()
        raise Refused(400, "header_twice", f"the header {twice} is there twice: send it once")


async def drop(receive: Receive) -> None:
    """Reads on for a while, keeping nothing."""
    num_bytes = 0
    more = True
    try:
        async with asyncio.timeout(LINGER_S):
            while more and num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        pass


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body in one piece, and then what the client's own returns: its disconnect."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return b"content-length" in headers or b"transfer-encoding" in headers


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """The client's own where it is safe to log, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
