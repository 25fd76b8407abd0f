"""HTTP connections: a request is its head and its body, and every connection is always in one state with a deadline.

Uvicorn's httptools protocol, with the bounds it lacks. `run.py` makes one `Connections` per server, which makes a
`Connection` for each client and is asked ten times a second to end those that are late. Bodies themselves are bounded
in `guard.py`, which also answers heads that are complete but too large.
"""

import asyncio
import enum
import http
import ipaddress
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.api.server import logs
from quire.api.server.errors import ErrorDetail, Problem
from quire.config.server import ServerConfig

MAX_HEAD_BYTES = 64 << 10  # request line and headers
MAX_URL_BYTES = 16 << 10
MAX_HEADER_LINES = 128
MAX_TRAILER_LINES = 64
FREE_OVERHEAD_BYTES = 64 << 10  # of a body: chunk sizes, extensions and trailers
OVERHEAD_PER_BODY_BYTE = 8  # and of these for each byte beside: chunks of one byte have 5
MAX_DROPPED_BYTES = 4 << 20  # after the last request that is read
MAX_PIPELINED = 16  # requests that wait while another is answered
MAX_TURNED_AWAY = 256  # connections beyond the limit that are being told so; more are cut without a word
SPARED_S = 5.0  # one that is idle for less is not closed for being one of too many: its client may be sending already
PROGRESS_BYTES = 64 << 10  # a client that takes in this much is reading
REFUSALS_LOGGED_S = 10.0
SWEEP_PARTS = 10  # sweeps that look at all connections once: all of them at once would hold up the event loop


class State(enum.Enum):
    """What a connection is waiting for."""

    HEAD = "the head of a request, which may not have begun on a new connection"
    IDLE = "the next request"
    BODY = "the body of a request"
    ANSWERING = "the answer"
    UNREAD = "a client to read its answer, while more of it cannot be sent"
    LINGERING = "a client to hang up, which was told that nothing more is read; what it still sends is dropped"
    CLOSING = "the last bytes to be sent"


def deadlines_s(config: ServerConfig) -> dict[State, float]:
    """How long a connection may stay in a state; UNREAD and CLOSING begin anew with every PROGRESS_BYTES taken in."""
    return {
        State.HEAD: 30.0,
        State.IDLE: config.keep_alive_s,
        State.BODY: config.body_timeout_s + 30,  # the guard's own limit comes first, and answers
        State.UNREAD: 120.0,
        State.LINGERING: 2.0,
        State.CLOSING: 30.0,
    }


WITHOUT_DEADLINE: Mapping[State, str] = {
    State.ANSWERING: "the limits of the request itself apply: max_tokens, timeout_s, the watchdog",
}


class Connection(HttpToolsProtocol):
    """One client's. Events only change what `state` reads; `Connections.sweep` looks at it."""

    def __init__(self, shared: "Connections", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared = shared
        self.address: str | None = None  # whom it counts for
        self.admitted = False
        self.running: Any = None  # the request being answered, of uvicorn's class; `cycle` is the newest one read
        self.in_head, self.in_body = True, False
        self.raw_bytes = 0  # received since the last head or body ended
        self.head_bytes = self.body_bytes = self.num_trailers = 0  # of this request
        self.reads = True  # what comes is parsed, else dropped
        self.dropped_bytes = 0
        self.lingering = False
        self.refusal: Problem | None = None  # of a request that cannot be read; sent after the answers to those before
        self.turn = 0  # counts what moves a connection on, so that staying in a state is told from coming back to it
        self.seen: tuple[State, int, int] | None = None  # by the last sweep
        self.since_s = 0.0

    @property
    def state(self) -> State:
        if self.transport.is_closing():
            return State.CLOSING
        if self.flow.write_paused:
            return State.UNREAD
        if self.lingering:
            return State.LINGERING
        if self.running is not None and not self.running.response_complete:
            return State.BODY if self.in_body and not self.pipeline else State.ANSWERING
        if self.in_body:
            return State.BODY
        return State.HEAD if self.in_head else State.IDLE

    def is_late(self, now_s: float, deadlines_s: Mapping[State, float]) -> bool:
        """Called by every sweep: whether the state of now has lasted for longer than it may."""
        state = self.state
        sends = state in (State.UNREAD, State.CLOSING)
        seen = (state, self.turn, self.transport.get_write_buffer_size() // PROGRESS_BYTES if sends else 0)
        if seen != self.seen:
            self.seen, self.since_s = seen, now_s
        return state in deadlines_s and now_s - self.since_s >= deadlines_s[state]

    def end(self) -> None:
        """Where the client takes nothing in, closing would wait for ever to send the rest."""
        if self.state in (State.HEAD, State.IDLE, State.BODY):
            self.transport.close()
        else:
            self.transport.abort()

    # ---------------------------------------------------------------- the transport's events

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.address = _address(self.client)
        if not self.shared.has_room_for(self):
            self._refuse(_TOO_MANY)

    def data_received(self, data: bytes) -> None:
        if not self.reads:
            self.dropped_bytes += len(data)
            if self.dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        self.raw_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.reads = False  # what follows is in no protocol spoken here
        except httptools.HttpParserError:
            self._refuse(self.refusal or _INVALID)
        else:
            if self.in_body:
                overhead = self.raw_bytes - self.body_bytes
                if overhead > FREE_OVERHEAD_BYTES + OVERHEAD_PER_BODY_BYTE * self.body_bytes:
                    self._refuse(_TOO_MUCH_OVERHEAD)
            elif self.raw_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.turn += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.forget(self)
        self.pipeline.clear()
        if self.running is not None and self.running is not self.cycle:  # uvicorn tells the newest request only
            self._abandon(self.running)
        super().connection_lost(exc)

    # ---------------------------------------------------------------- the parser's events; raising ends the parsing

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._cannot_read(_TOO_MANY_WAITING)
        super().on_message_begin()
        self.turn += 1
        self.in_head = True
        self.head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._cannot_read(_URL_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_body:  # a trailer: never a header, and kept nowhere
            self.num_trailers += 1
            if self.num_trailers > MAX_TRAILER_LINES:
                self._cannot_read(_TOO_MUCH_OVERHEAD)
            return
        self.head_bytes += len(name) + len(value)
        if self.head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADER_LINES:
            self._cannot_read(_HEAD_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if reason := self._why_unclear():
            self._cannot_read(_bad_request(reason))
        super().on_headers_complete()
        if not self.pipeline:
            self.running = self.cycle
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        self.turn += 1
        self.in_head, self.in_body = False, True
        self.raw_bytes = self.body_bytes = self.num_trailers = 0

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_keep_alive():  # a trailer can say so, too: the parser reads nothing more
            self.cycle.keep_alive = False
        super().on_message_complete()
        self.turn += 1
        self.in_body = False
        self.raw_bytes = 0

    def _why_unclear(self) -> str | None:
        """Why a complete head leaves in doubt where its request ends; the parser itself refuses much before this."""
        version = self.parser.get_http_version()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            return "this server speaks HTTP/1.1: send the request in that version"
        if codings and (codings != [b"chunked"] or version == "1.0"):
            return "the only Transfer-Encoding read here is chunked, once, in HTTP/1.1: send the body without others"
        if self.parser.should_upgrade():  # ends the message at its head, whatever the head says
            if self.parser.get_method() == b"CONNECT":
                return "this server is no proxy: send requests to it with another method than CONNECT"
            if codings or any(name == b"content-length" and value.strip(b" \t0") for name, value in self.headers):
                return "this server does not switch protocols: send the request as HTTP/1.1, without an Upgrade header"
        return None

    # ---------------------------------------------------------------- answers

    def on_response_complete(self) -> None:
        """Instead of uvicorn's, which sets a timer of its own and reads on while requests wait."""
        self.server_state.total_requests += 1
        self.turn += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.running, app = self.pipeline.pop()
            self._start_asgi_task(self.running, app)
        elif self.refusal is not None:
            self._tell(self.refusal)
        if not self.pipeline:
            self.flow.resume_reading()

    def _cannot_read(self, problem: Problem) -> None:
        self.refusal = problem
        raise _Unreadable

    def _refuse(self, problem: Problem) -> None:
        """Nothing more is read. The client is told why, after the answers to what it asked before."""
        self.reads = False
        self.flow.resume_reading()  # to drop it, and to see when the client goes
        self.refusal = problem
        if self.in_body and self.pipeline:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self.running
        elif self.in_body:  # and being answered, or waited for
            started = self.running.response_started
            self._abandon(self.running)
            self._tell(None if started else problem)
            return
        if self.running is None or self.running.response_complete:
            self._tell(problem)

    def _abandon(self, request: Any) -> None:
        """To its endpoint, as if the client had gone."""
        if not request.response_complete:
            request.disconnected = True
            request.waiting_for_100_continue = False
        request.message_event.set()

    def _tell(self, problem: Problem | None) -> None:
        """The last words. Closing at once would reset the connection while the client still sends, and lose them."""
        if self.transport.is_closing():
            return
        if problem is not None:
            self.transport.write(_answer(problem))
        self.lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()


class Connections:
    """All connections of one server: how many there may be, and the one clock for their deadlines."""

    def __init__(self, config: ServerConfig) -> None:
        self.most = config.max_connections
        self.most_per_address = config.max_connections_per_address or max(1, self.most * 3 // 4)  # a rest for others
        self.most_idle = config.max_idle_connections
        self.most_idle_per_address = max(1, self.most_idle // 2)
        self.deadlines_s = deadlines_s(config)
        self.all: set[Connection] = set()
        self.num_admitted = 0
        self.by_address: Counter[str | None] = Counter()  # of those admitted
        self.idle: dict[Connection, None] = {}  # as seen by the last sweep, the longest idle first
        self.idle_by_address: Counter[str | None] = Counter()
        self.parts: list[set[Connection]] = [set() for _ in range(SWEEP_PARTS)]
        self.num_sweeps = 0
        self.num_refused = 0  # since the last line in the log
        self.logged_s = float("-inf")

    def new(self, **kwargs: Any) -> Connection:
        """For one client; the arguments are those of uvicorn's protocol."""
        return Connection(self, **kwargs)

    def has_room_for(self, connection: Connection) -> bool:
        self.all.add(connection)
        min(self.parts, key=len).add(connection)
        address = connection.address
        too_many_of_it = address is not None and self.by_address[address] >= self.most_per_address
        if too_many_of_it or self.num_admitted >= self.most:
            self.num_refused += 1
            if len(self.all) - self.num_admitted > MAX_TURNED_AWAY:
                connection.transport.abort()
            return False
        connection.admitted = True
        self.num_admitted += 1
        self.by_address[address] += 1
        return True

    def forget(self, connection: Connection) -> None:
        self.all.discard(connection)
        for part in self.parts:
            part.discard(connection)
        self._is_idle(connection, False)
        if connection.admitted:
            self.num_admitted -= 1
            _count_down(self.by_address, connection.address)

    def sweep(self, now_s: float) -> None:
        """Ends what is late in one of SWEEP_PARTS parts of all connections, and idle ones where there are too many."""
        self.num_sweeps += 1
        for connection in list(self.parts[self.num_sweeps % len(self.parts)]):
            if connection.is_late(now_s, self.deadlines_s):
                connection.end()
            elif connection.since_s == now_s:  # something happened since the last time
                self._is_idle(connection, False)
                self._is_idle(connection, connection.seen[0] is State.IDLE)
        self._close_idle(now_s)
        if self.num_refused and now_s - self.logged_s >= REFUSALS_LOGGED_S:
            text = "%d connections were refused: too many, in total or from one address; see --max-connections"
            logs.log.warning(text, self.num_refused)
            self.num_refused, self.logged_s = 0, now_s

    def _is_idle(self, connection: Connection, idle: bool) -> None:
        if idle:
            self.idle[connection] = None
            self.idle_by_address[connection.address] += 1
        elif connection in self.idle:
            del self.idle[connection]
            _count_down(self.idle_by_address, connection.address)

    def _close_idle(self, now_s: float) -> None:
        """Beyond the limits, the longest idle first."""
        if len(self.idle) <= self.most_idle_per_address:
            return
        for connection in list(self.idle):
            if now_s - connection.since_s < SPARED_S:
                return
            address = connection.address
            too_many_of_it = address is not None and self.idle_by_address[address] > self.most_idle_per_address
            if too_many_of_it or len(self.idle) > self.most_idle:
                self._is_idle(connection, False)
                connection.transport.close()


def _count_down(counts: Counter[str | None], address: str | None) -> None:
    """One less of it; an address with none left is not kept."""
    counts[address] -= 1
    if not counts[address]:
        del counts[address]


class _Unreadable(Exception):
    """Ends the parser's work from within; `refusal` says why."""


def _address(client: tuple[str, int] | None) -> str | None:
    """Whom a connection counts for: an IPv4 address, or the first half of an IPv6 address: the rest is its owner's."""
    if client is None:  # a Unix socket
        return None
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return client[0]
    if address.version == 6:
        return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


def _answer(problem: Problem) -> bytes:
    """For clients that no endpoint ever sees."""
    body = problem.body
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", uuid.uuid4().hex.encode()),
        (b"connection", b"close"),
        *problem.headers,
    ]
    lines = [b"HTTP/1.1 %d %s" % (problem.status, http.HTTPStatus(problem.status).phrase.encode())]
    return b"\r\n".join([*lines, *(name + b": " + value for name, value in head), b"", body])


def _bad_request(message: str, status: int = 400, code: str = "invalid_http") -> Problem:
    return Problem(status, ErrorDetail(message, "invalid_request_error", code=code))


def _overloaded(message: str) -> Problem:
    return Problem(503, ErrorDetail(message, "overloaded_error", code="overloaded"), [(b"retry-after", b"1")])


_INVALID = _bad_request("this is no HTTP/1.1 request: send a request line, headers and body as RFC 9112 describes them")
_TOO_MUCH_OVERHEAD = _bad_request("the body has too many chunk extensions or trailers: send it without them")
_URL_TOO_LONG = _bad_request(f"the URL is longer than {MAX_URL_BYTES:,} bytes: send less", 414, "url_too_long")
_HEAD_TOO_LARGE = _bad_request(
    f"the headers are more than {MAX_HEADER_LINES} lines or {MAX_HEAD_BYTES:,} bytes: send less",
    431,
    "headers_too_large",
)
_TOO_MANY = _overloaded("there are too many connections: close some, try again later, or raise --max-connections")
_TOO_MANY_WAITING = _overloaded(f"more than {MAX_PIPELINED} requests wait on this connection: send them one by one")
