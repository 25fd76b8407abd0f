"""HTTP connections: a request is its head and its body, and every connection is always in one state with a deadline.

Uvicorn's httptools protocol, with the limits it lacks. `run.py` makes one `Connections` per server, which makes a
`Connection` for each client; ten times a second `run.py` has it end the connections that are late. Bodies themselves
are bounded in `guard.py`, which also answers heads that are complete but too large.
"""

import asyncio
import enum
import http
import ipaddress
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.api.server import logs
from quire.api.server.errors import ErrorBody, ErrorDetail, Problem
from quire.config.server import ServerConfig

MAX_HEAD_BYTES = 64 << 10  # request line and headers
MAX_URL_BYTES = 16 << 10
MAX_HEADER_LINES = 128
MAX_TRAILER_LINES = 64
# Overhead of a chunked body: chunk sizes, extensions and trailers. Chunks of one byte have 5 bytes of it each.
FREE_OVERHEAD_BYTES = 64 << 10
OVERHEAD_PER_BODY_BYTE = 8
MAX_DROPPED_BYTES = 4 << 20  # of what a client sends after the last request that is read
MAX_PIPELINED = 16  # requests that wait while another is answered
MAX_TURNED_AWAY = 256  # connections beyond the limit that get an answer saying so; more are cut without one
# Of too many idle connections, one that is idle for less than this is not closed: its client may be sending already.
SPARED_S = 5.0
PROGRESS_BYTES = 64 << 10  # a client that takes in this much is reading
REFUSALS_LOGGED_S = 10.0  # at least between two lines in the log
# A sweep looks at one of so many parts of all connections: looking at all of them would hold up the event loop.
SWEEP_PARTS = 10


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
    """How long a connection may stay in a state; in UNREAD and CLOSING, without taking in another PROGRESS_BYTES."""
    return {
        State.HEAD: 30.0,
        State.IDLE: config.keep_alive_s,
        State.BODY: config.body_timeout_s + 30,  # the guard's own limit comes first, and sends an answer
        State.UNREAD: 120.0,
        State.LINGERING: 2.0,
        State.CLOSING: 30.0,
    }


WITHOUT_DEADLINE: Mapping[State, str] = {
    State.ANSWERING: "the limits of the request itself apply: max_tokens, timeout_s, the watchdog",
}


class Connection(HttpToolsProtocol):
    """The connection of one client. Events change the attributes that `state` is computed from, and set no timers:
    `Connections.sweep` looks at the state."""

    def __init__(self, shared: "Connections", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared = shared
        self.address: str | None = None  # whose limit of connections it counts for
        self.admitted = False
        self.running: Any = None  # the request being answered, of uvicorn's class; `cycle` is the newest one read
        self.in_head = True
        self.in_body = False
        self.raw_bytes = 0  # received since the last head or body ended
        self.head_bytes = self.body_bytes = self.num_trailers = 0  # of this request
        self.reads = True  # whether what arrives is parsed, else it is dropped
        self.dropped_bytes = 0
        self.lingering = False
        self.refusal: Problem | None = None  # of a request that cannot be read; sent after the answers to those before
        self.turn = 0  # counts events, so that staying in a state can be told from coming back to it
        self.seen = (State.HEAD, -1, 0)  # by the last sweep: the state, its turn, and how much is still to be sent
        self.since_s = 0.0  # when the last sweep saw that for the first time

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
        """Called by every sweep: whether the connection has been in its state for longer than it may."""
        state = self.state
        num_unsent = 0
        if state in (State.UNREAD, State.CLOSING):
            num_unsent = self.transport.get_write_buffer_size() // PROGRESS_BYTES
        seen = (state, self.turn, num_unsent)
        if seen != self.seen:
            self.seen = seen
            self.since_s = now_s
        return state in deadlines_s and now_s - self.since_s >= deadlines_s[state]

    def end(self) -> None:
        """Closes it; cuts it where the client takes nothing in, since closing would wait for ever to send the rest."""
        if self.state in (State.HEAD, State.IDLE, State.BODY):
            self.transport.close()
        else:
            self.transport.abort()

    # ---------------------------------------------------------------- the transport's events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
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
            self.reads = False  # what follows is in a protocol that this server does not speak
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
        # Uvicorn tells only the newest request that the client is gone.
        if self.running is not None and self.running is not self.cycle:
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
        if self.in_body:  # a trailer, which is not kept
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
        self.in_head = False
        self.in_body = True
        self.raw_bytes = self.body_bytes = self.num_trailers = 0

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_keep_alive():  # a trailer can end the connection, too: the parser reads nothing more
            self.cycle.keep_alive = False
        super().on_message_complete()
        self.turn += 1
        self.in_body = False
        self.raw_bytes = 0

    def _why_unclear(self) -> str | None:
        """Why a complete head leaves it unclear where its request ends; None if it does not. The parser itself has
        refused other such heads before this."""
        version = self.parser.get_http_version()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            return "this server speaks HTTP/1.1: send the request in that version"
        readable_codings = ([], [b"chunked"]) if version == "1.1" else ([],)
        if codings not in readable_codings:
            return "the only Transfer-Encoding read here is chunked, once, in HTTP/1.1: send the body without others"
        if self.parser.should_upgrade():  # ends the message at its head, whatever the head says
            if self.parser.get_method() == b"CONNECT":
                return "this server is no proxy: send requests to it with another method than CONNECT"
            lengths = [value.strip(b" \t0") for name, value in self.headers if name == b"content-length"]
            if codings or any(lengths):
                return "this server does not switch protocols: send the request as HTTP/1.1, without an Upgrade header"
        return None

    # ---------------------------------------------------------------- answers

    def on_response_complete(self) -> None:
        """Replaces uvicorn's, which sets a timer of its own and goes on reading while requests wait."""
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
        """Reads nothing more. The client is told why, after the answers to the requests it sent before."""
        self.reads = False
        self.flow.resume_reading()  # to drop what arrives, and to notice when the client hangs up
        self.refusal = problem
        if self.in_body and self.pipeline:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self.running
        elif self.in_body:  # of the request that is being answered, or whose body its endpoint waits for
            started = self.running.response_started
            self._abandon(self.running)
            self._tell(None if started else problem)
            return
        if self.running is None or self.running.response_complete:
            self._tell(problem)

    def _abandon(self, request: Any) -> None:
        """Lets the request's endpoint see a disconnect, as if the client had gone."""
        if not request.response_complete:
            request.disconnected = True
            request.waiting_for_100_continue = False
        request.message_event.set()

    def _tell(self, problem: Problem | None) -> None:
        """Sends the last answer, if any, and lingers: closing at once would reset the connection while the client still
        sends, and the answer would be lost."""
        if self.transport.is_closing():
            return
        if problem is not None:
            self.transport.write(_answer(problem))
        self.lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()


class Connections:
    """All connections of one server: how many there may be, and the sweeps that enforce their deadlines."""

    def __init__(self, config: ServerConfig) -> None:
        self.most = config.max_connections
        # By default one address leaves a quarter of all connections to others.
        self.most_per_address = config.max_connections_per_address or max(1, self.most * 3 // 4)
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
        """A connection for one client; the arguments are those of uvicorn's protocol."""
        return Connection(self, **kwargs)

    def has_room_for(self, connection: Connection) -> bool:
        self.all.add(connection)
        min(self.parts, key=len).add(connection)
        address = connection.address
        is_over_share = address is not None and self.by_address[address] >= self.most_per_address
        if is_over_share or self.num_admitted >= self.most:
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
        self._set_idle(connection, False)
        if connection.admitted:
            self.num_admitted -= 1
            _count_down(self.by_address, connection.address)

    def sweep(self, now_s: float) -> None:
        """Ends the late ones in one of SWEEP_PARTS parts of all connections, and idle ones where there are too many."""
        self.num_sweeps += 1
        for connection in list(self.parts[self.num_sweeps % len(self.parts)]):
            if connection.is_late(now_s, self.deadlines_s):
                connection.end()
            elif connection.since_s == now_s:  # its state is not what the last sweep saw
                self._set_idle(connection, False)
                self._set_idle(connection, connection.seen[0] is State.IDLE)
        self._close_idle(now_s)
        if self.num_refused and now_s - self.logged_s >= REFUSALS_LOGGED_S:
            text = "%d connections were refused: too many, in total or from one address; see --max-connections"
            logs.log.warning(text, self.num_refused)
            self.num_refused = 0
            self.logged_s = now_s

    def _set_idle(self, connection: Connection, is_idle: bool) -> None:
        if is_idle:
            self.idle[connection] = None
            self.idle_by_address[connection.address] += 1
        elif connection in self.idle:
            del self.idle[connection]
            _count_down(self.idle_by_address, connection.address)

    def _close_idle(self, now_s: float) -> None:
        """Closes idle connections beyond the limits, the longest idle first."""
        if len(self.idle) <= self.most_idle_per_address:
            return
        for connection in list(self.idle):
            if now_s - connection.since_s < SPARED_S:
                return
            address = connection.address
            is_over_share = address is not None and self.idle_by_address[address] > self.most_idle_per_address
            if is_over_share or len(self.idle) > self.most_idle:
                self._set_idle(connection, False)
                connection.transport.close()


def _count_down(counts: Counter[str | None], address: str | None) -> None:
    """Takes one off an address's count; an address with none left is not kept."""
    counts[address] -= 1
    if not counts[address]:
        del counts[address]


class _Unreadable(Exception):
    """Raised in the parser's events to end parsing; the connection's `refusal` says why."""


def _address(client: tuple[str, int] | None) -> str | None:
    """Whose limit a connection counts for: an IPv4 address, or the first half of an IPv6 address, since one client
    usually has all addresses that begin with the same half."""
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
    """A whole HTTP answer, for requests that never reach an endpoint."""
    request_id = uuid.uuid4().hex
    body = ErrorBody.encode(problem, request_id)
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
        (b"connection", b"close"),
        *problem.headers,
    ]
    status_line = b"HTTP/1.1 %d %s" % (problem.status, http.HTTPStatus(problem.status).phrase.encode())
    header_lines = [name + b": " + value for name, value in head]
    return b"\r\n".join([status_line, *header_lines, b"", body])


def _bad_request(message: str, status: int = 400, code: str = "invalid_http") -> Problem:
    return Problem(status, ErrorDetail(message, "invalid_request_error", code=code))


def _overloaded(message: str) -> Problem:
    return Problem(503, ErrorDetail(message, "overloaded_error", code="overloaded"), [(b"retry-after", b"1")])


_INVALID = _bad_request("this is no HTTP/1.1 request: send a request line, headers and body as RFC 9112 describes them")
_TOO_MUCH_OVERHEAD = _bad_request("the body has too many chunk extensions or trailers: send it without them")
_URL_TOO_LONG = _bad_request(f"the URL is longer than {MAX_URL_BYTES:,} bytes: send less", 414, "url_too_long")
_HEAD_LIMITS = f"{MAX_HEADER_LINES} lines or {MAX_HEAD_BYTES:,} bytes"
_HEAD_TOO_LARGE = _bad_request(f"the headers are more than {_HEAD_LIMITS}: send less", 431, "headers_too_large")
_TOO_MANY = _overloaded("there are too many connections: close some, or try again later")
_TOO_MANY_WAITING = _overloaded(f"more than {MAX_PIPELINED} requests wait on this connection: send them one by one")
