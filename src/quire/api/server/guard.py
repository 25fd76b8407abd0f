"""The one gate in front of every endpoint: who may call, how much they may send, and a request id and log line for each call.

A plain ASGI middleware that `run.py` puts around the app. Deny by default: what the table of endpoints (`policy_of`) does not know
needs a key like any other. Knows nothing of models, and lets the messages of a stream pass untouched.
"""

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

from quire.api.server import logs
from quire.api.server.errors import ErrorDetail, Problem, problem
from quire.api.server.json_cost import CHEAP_BYTES, MAX_NUMBER_CHARS, json_cost
from quire.config.server import ServerConfig, check_key
from quire.errors import ConfigError
from quire.utils.files import read_file

Policy = Literal["open", "user", "admin"]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_HEADER_BYTES = 32 << 10
MAX_KEY_FILE_BYTES = 1 << 20
CLIENT_GONE = 499  # in the log: nobody was there to get a status
LINGER_S, LINGER_BYTES = 2.0, 64 << 20  # how long and how much of a refused body is read and dropped

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_ONCE = {b"authorization", b"content-length", b"content-type", b"host", b"transfer-encoding", b"x-request-id"}


class Refused(Exception):
    """This call ends here, with a problem for an answer; where there is a body, `body_read` says that it was taken in."""

    def __init__(
        self, status: int, code: str, message: str, kind: str = "invalid_request_error", body_read: bool = False
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, ErrorDetail(message, kind, code=code))
        self.body_read = body_read


class ClientGone(Exception):
    """The client went away while sending."""


class Guard:
    def __init__(self, app: App, policy_of: Callable[[str, str], Policy | None], config: ServerConfig) -> None:
        self.app = app
        self.policy_of = policy_of
        self.config = config
        self.keys = Keys(config)
        self.cors = Cors(config.allowed_origins)
        self.held = HeldBytes(config.max_held_bytes)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:  # no endpoint speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        reply = Reply(send, [(b"x-request-id", request_id), *self.cors.headers(headers)])
        policy = self.policy_of(scope["method"], scope["path"])
        has_body = b"content-length" in headers or b"transfer-encoding" in headers
        body, share = b"", self.held.share((scope.get("client") or ("",))[0])
        try:
            check_head(scope["headers"])
            if self.cors.is_preflight(scope, headers):
                await self.cors.preflight(headers, reply)
                return
            scope["state"]["owner"] = self.keys.check(policy, headers)
            if has_body:
                body = await self._body(headers, receive, share)
                receive = replay(body, receive)
            await self.app(scope, receive, reply.send)
        except ClientGone:
            pass
        except Refused as refused:
            await reply.problem(refused.problem, unread=receive if has_body and not refused.body_read else None)
        except Exception as error:
            unforeseen = problem(error, request_id.decode())
            if not reply.status:  # else the stream ends short, which is all that can still be said
                await reply.problem(unforeseen)
        finally:
            share.give_back()
            if self.config.access_log and (
                policy != "open" or reply.status not in (200, 503)
            ):  # probes come every second
                shown = body if self.config.log_requests else None
                logs.request(scope, reply.status or CLIENT_GONE, time.perf_counter() - started, shown)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, share: "Share") -> bytes:
        """The whole body, within the limits of size, time, depth and number of values."""
        limit, declared = self.config.max_body_bytes, headers.get(b"content-length", b"0")
        too_large = f"the body is larger than {limit:,} bytes: send less, or raise --max-body-bytes"
        if not declared.isdigit() or len(declared) > 15 or int(declared) > limit:
            raise Refused(413, "body_too_large", too_large)
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
                        raise Refused(413, "body_too_large", too_large, body_read=not more)
                    if not share.hold(len(part)):
                        text = "the bodies of the requests under way take all the memory there is for them: try again later"
                        raise Refused(503, "overloaded", text, "overloaded_error", body_read=not more)
                    body += part
        except TimeoutError:
            text = f"the body did not arrive within {self.config.body_timeout_s:g} s: send faster, or raise --body-timeout-s"
            raise Refused(408, "body_timeout", text, "timeout_error") from None
        # A web page can send other types to a server on its visitor's machine without asking; JSON it must ask for.
        if body and headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            text = "the body must be JSON: send it with Content-Type: application/json"
            raise Refused(415, "unsupported_media_type", text, body_read=True)
        await self._check_cost(body)
        return bytes(body)

    async def _check_cost(self, body: bytearray) -> None:
        """Refuses JSON that would take long to decode, which happens in one piece."""
        max_depth, max_values = self.config.max_json_depth, self.config.max_json_values
        if len(body) <= CHEAP_BYTES and body.count(b"[") + body.count(b"{") <= max_depth:
            return
        cost = await json_cost(body)
        if cost.max_depth > max_depth:
            text = f"the body nests lists and objects deeper than {max_depth}: flatten it, or raise --max-json-depth"
            raise Refused(400, "json_too_deep", text, body_read=True)
        if cost.num_values > max_values:
            text = f"the body's JSON holds more than {max_values:,} values: send less, or raise --max-json-values"
            raise Refused(400, "json_too_large", text, body_read=True)
        if cost.has_long_number:
            text = f"the body holds a number of more than {MAX_NUMBER_CHARS} characters: shorten it"
            raise Refused(400, "number_too_long", text, body_read=True)


class Reply:
    """What goes back to the client: knows the status, and adds headers where the answer starts."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self.headers = headers
        self.status = 0  # nothing sent yet

    def send(self, message: Message) -> Awaitable[None]:
        """The `send` an app gets; not a coroutine itself, because it is called once per token."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        return self._send(message)

    async def problem(self, problem: Problem, unread: Receive | None = None) -> None:
        """Answers at once. A body still on the way is read and dropped for a while before the connection is closed: closing on it
        would reset the connection, and a client that sends first and reads later would never see the answer."""
        body = problem.body
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


class Keys:
    """Who may call what. Keys are kept and compared as digests of equal length, all of them every time."""

    def __init__(self, config: ServerConfig) -> None:
        users = [*config.api_key, *(_read_keys(config.api_key_file) if config.api_key_file else [])]
        admins = [config.admin_api_key] if config.admin_api_key else []
        self.admins = [_digest(key.encode()) for key in admins]
        self.users = [_digest(key.encode()) for key in [*users, *admins]] if users else []

    def check(self, policy: Policy | None, headers: dict[bytes, bytes]) -> str:
        """Whose call it is, as a digest of the key; empty where none is needed. Refused: there is none, or a wrong one."""
        if policy == "open" or (not self.users and policy != "admin"):
            return ""
        if policy == "admin" and not self.admins:
            text = "this path is for operators: start the server with --admin-api-key to use it"
            raise Refused(403, "no_admin_key", text, "permission_error")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(given.strip())
        fits = [hmac.compare_digest(digest, key) for key in (self.admins if policy == "admin" else self.users)]
        if scheme.lower() != b"bearer" or not any(fits):
            which = "an operator's key" if policy == "admin" else "a valid API key"
            text = f"{which} is needed: send it as Authorization: Bearer KEY"
            raise Refused(401, "invalid_api_key", text, "authentication_error")
        return digest.hex()


class HeldBytes:
    """How much the bodies of calls under way may take: together, and half of it those of one address."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def share(self, address: str) -> "Share":
        return Share(self, address)


class Share:
    """What one call has of it."""

    def __init__(self, held: HeldBytes, address: str) -> None:
        self.held, self.address = held, address
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> bool:
        """False where there is not enough left. A lone body is bounded by its own limit, so it always fits."""
        held = self.held
        is_alone = held.by_address[self.address] == self.num_bytes
        if held.total + num_bytes > held.limit or (
            held.by_address[self.address] + num_bytes > held.limit // 2 and not is_alone
        ):
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


class Cors:
    """What browsers ask before a page of another origin may call. Without allowed origins nothing is answered."""

    def __init__(self, origins: list[str]) -> None:
        self.any = "*" in origins
        self.origins = {origin.encode() for origin in origins}

    def headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        if not self.origins:
            return []
        vary = (b"vary", b"Origin")
        origin = headers.get(b"origin")
        if origin is None or not (self.any or origin in self.origins):
            return [vary]
        allowed = b"*" if self.any else origin
        return [vary, (b"access-control-allow-origin", allowed), (b"access-control-expose-headers", b"X-Request-Id")]

    def is_preflight(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> bool:
        return bool(self.origins) and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers

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
    num_bytes, more = 0, True
    try:
        async with asyncio.timeout(LINGER_S):
            while more and num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        pass


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body in one piece, then whatever comes next: the client's leaving."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """The client's own where it can be trusted in a log, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read_keys(path: str) -> list[str]:
    """One key per line; empty lines and lines that begin with # are left out. No key at all is a mistake, not an open server."""
    try:
        lines = read_file(Path(path).expanduser(), MAX_KEY_FILE_BYTES).decode().splitlines()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: no such home; ValueError: bad UTF-8, a null character
        why = getattr(error, "strerror", None) or "it is not the path of a UTF-8 text"
        raise ConfigError(f"the key file {path!r} cannot be read: {why}") from None
    keys = [check_key(line.strip()) for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ConfigError(f"the key file {path!r} holds no key: write one per line")
    return keys
