"""Connections on real sockets: what begins a request and what ends one, deadlines, and how many there may be."""

import asyncio
import gc
import json
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
import uvloop

from quire.api.server import connection, run
from quire.api.server.connection import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    WITHOUT_DEADLINE,
    Connections,
    State,
    deadlines_s,
)
from quire.api.server.run import Http, allow_open_files, listen
from quire.config.server import ServerConfig
from tests.serving import until

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /read HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BODY = b"\r\n\r\nok"
NEXT = HEAD.replace(b"/ ", b"/next ") + b"\r\n"
CERTIFICATE = Path(__file__).with_name("localhost.pem")

served: list[bytes] = []  # paths, and the words below


async def app(scope, receive, send):
    path = scope["path"].encode()
    served.append(path)
    headers = [(b"content-length", b"2")]
    if path == b"/read":
        body = b""
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        served.append(body if message["type"] == "http.request" else b"gone")
        served.extend(name for name, _ in scope["headers"] if name == b"authorization")
    elif path == b"/slow":
        await asyncio.sleep(1.2)
    elif path == b"/endless":
        headers = []
    elif path == b"/large":
        headers = [(b"content-length", b"%d" % (16 << 20))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if path == b"/endless":
        await receive()
        leaving = asyncio.create_task(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 131072, "more_body": True})
            await asyncio.sleep(0)
        served.append(b"gone")
    await send({"type": "http.response.body", "body": b"x" * (16 << 20) if path == b"/large" else b"ok"})


class Running:
    def __init__(self, http: Http, address: tuple[str, int]) -> None:
        self.connections = http.connections
        self.address = address

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)


@contextmanager
def running(config: ServerConfig | None = None, tls: bool = False, **deadlines: float) -> Iterator[Running]:
    """A server, with these deadlines instead of the usual ones."""
    connections = Connections(config or ServerConfig())
    connections.parts = [set()]  # all are swept every time
    connections.deadlines_s |= {State[name]: seconds for name, seconds in deadlines.items()}
    certificate = {"ssl_certfile": str(CERTIFICATE)} if tls else {}
    options = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1, **certificate
    )
    options.load()
    http = Http(options, connections)
    with listen("127.0.0.1", 0) as sock:
        address = sock.getsockname()
        thread = threading.Thread(target=lambda: uvloop.run(http.serve(sockets=[sock])), daemon=True)
        thread.start()
        try:
            yield Running(http, address)
        finally:
            http.should_exit = True
            thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def nothing_served():
    served.clear()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with running(HEAD=0.5) as server:
        yield server.address


def everything(sock: socket.socket) -> bytes:
    """What comes until the server closes."""
    sock.settimeout(5)
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # it closed while we were still sending
        pass
    return b"".join(parts)


def answers(sock: socket.socket, count: int) -> None:
    """Waits for this many."""
    sock.settimeout(5)
    received = b""
    while received.count(BODY) < count:
        part = sock.recv(65536)
        assert part, received
        received += part


def refused(answer: bytes, status: int) -> str:
    """The sentence of the only answer there is."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head, answer
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


def is_open(sock: socket.socket, seconds: float) -> bool:
    """Whether the server keeps it for so long."""
    sock.settimeout(seconds)
    try:
        return bool(sock.recv(65536))
    except TimeoutError:
        return True
    except OSError:
        return False


# -- heads -------------------------------------------------------------------------------------------------------------


def test_a_head_without_end_is_cut_off(address):
    with socket.create_connection(address) as sock:
        sock.sendall(HEAD)
        for _ in range(100):
            sock.sendall(b"x: " + b"y" * 1000 + b"\r\n")
        refused(everything(sock), 431)


def test_one_header_without_end_is_cut_off(address):
    with socket.create_connection(address) as sock:
        sock.sendall(HEAD + b"x: ")
        with pytest.raises(OSError):
            for _ in range(10_000):
                sock.sendall(b"y" * 10_000)


@pytest.mark.parametrize("size", [2 * MAX_HEAD_BYTES, 200_000])
def test_a_head_that_comes_in_one_piece_is_bounded_too(address, size):
    for head, status in (
        (HEAD + b"x: " + b"y" * size, 431),
        (HEAD + b"x: y\r\n" * (size // 6), 431),
        (b"GET /" + b"y" * size, 414),
    ):
        with socket.create_connection(address) as sock:
            sock.sendall(head + b"\r\n\r\n")
            refused(everything(sock), status)
    assert not served


def test_header_lines_are_counted(address):
    for num_lines, first in ((127, b"HTTP/1.1 200"), (128, b"HTTP/1.1 431")):
        with socket.create_connection(address) as sock:
            sock.sendall(HEAD + b"x: y\r\n" * num_lines + b"\r\n")
            assert sock.recv(65536).startswith(first)


@pytest.mark.parametrize("beginning", [b"", b"G", HEAD, HEAD + b"x: ", b"\r\n" * 10])
def test_a_head_that_does_not_come_is_not_waited_for(address, beginning):
    with socket.create_connection(address) as sock:
        started = time.monotonic()
        sock.sendall(beginning)
        assert everything(sock) == b""
        assert 0.3 < time.monotonic() - started < 3


def test_a_head_that_drips_is_not_waited_for(address):
    with socket.create_connection(address) as sock:
        with pytest.raises(OSError):
            sock.sendall(HEAD + b"x: ")
            for _ in range(40):
                sock.sendall(b"y")
                time.sleep(0.05)


def test_ordinary_requests_share_a_connection_for_longer_than_a_head_may_take(address):
    with socket.create_connection(address) as sock:
        for _ in range(3):
            sock.sendall(HEAD + b"\r\n")
            answers(sock, 1)
            time.sleep(0.3)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_every_state_has_a_deadline_or_a_reason_to_have_none():
    table = deadlines_s(ServerConfig())
    assert table.keys() | WITHOUT_DEADLINE.keys() == set(State) and not table.keys() & WITHOUT_DEADLINE.keys()
    assert all(0 < seconds <= 300 for seconds in table.values()) and all(WITHOUT_DEADLINE.values())
    assert table.keys() == STAYING.keys()  # below, where each is tried


def test_options_move_the_deadlines():
    table = deadlines_s(ServerConfig(keep_alive_s=600, body_timeout_s=1000))
    assert table[State.IDLE] == 600 and table[State.BODY] > 1000  # the guard has time to answer


# What a client does, and then nothing more.
STAYING = {
    State.HEAD: HEAD,
    State.IDLE: HEAD + b"\r\n",
    State.BODY: POST + b"content-length: 3\r\n\r\na",
    State.UNREAD: HEAD.replace(b"/ ", b"/endless ") + b"\r\n",
    State.LINGERING: b"nonsense\r\n",
    State.CLOSING: HEAD.replace(b"/ ", b"/large ") + b"connection: close\r\n\r\n",
}


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("state", STAYING)
def test_no_client_stays_in_a_state_for_longer_than_its_deadline(state, tls):
    with running(tls=tls, **{"CLOSING": 1.0, state.name: 1.0}) as server, ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(server.address)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sock = stack.enter_context(context.wrap_socket(sock))
        sock.sendall(STAYING[state])
        until(lambda: any(c.transport and c.state is state for c in list(server.connections.all)), what=f"{state}")
        until(lambda: not server.connections.all, what="the end of the connection")


def test_an_answer_may_take_longer_than_any_deadline():
    with running(**{state.name: 0.5 for state in STAYING}) as server, server.connect() as sock:
        sock.sendall(HEAD.replace(b"/ ", b"/slow ") + b"\r\n")
        answers(sock, 1)
        sock.sendall(HEAD + b"\r\n")
        answers(sock, 1)


def test_requests_one_after_the_other_do_not_look_like_one_long_wait():
    with running(HEAD=0.4, IDLE=0.4, BODY=0.4) as server, server.connect() as sock:
        for _ in range(40):
            sock.sendall(POST + b"content-length: 1\r\n\r\na")
            answers(sock, 1)
            time.sleep(0.02)


def test_a_slow_reader_is_not_late_while_it_reads():
    with running(UNREAD=0.4, CLOSING=0.4) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect(server.address)
        sock.sendall(HEAD.replace(b"/ ", b"/large ") + b"connection: close\r\n\r\n")
        num_bytes = 0
        while part := sock.recv(1 << 20):
            num_bytes += len(part)
            time.sleep(0.01)
        assert num_bytes > 16 << 20


def test_a_reader_slower_than_its_stream_is_not_late_while_it_reads(monkeypatch):
    # The client takes in what was sent so far, and more is sent at once: what is left unsent never shows progress.
    monkeypatch.setattr(connection, "PROGRESS_BYTES", 1 << 40)
    with running(UNREAD=0.4) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.connect(server.address)
        sock.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
        (there,) = until(lambda: len(server.connections.all) == 1) or server.connections.all
        num_unread, ends_s = 0, time.monotonic() + 2.5
        while time.monotonic() < ends_s:
            assert sock.recv(65536)
            num_unread += there.state is State.UNREAD
            time.sleep(0.002)
        assert num_unread > 100


def test_bytes_that_begin_no_request_do_not_prolong_a_connection():
    with running(IDLE=0.5) as server, server.connect() as sock:
        sock.sendall(HEAD + b"\r\n")
        answers(sock, 1)
        with pytest.raises(OSError):
            for _ in range(60):
                sock.sendall(b"\r\n")
                time.sleep(0.05)


def test_a_tls_client_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(run, "HANDSHAKE_S", 0.3)
    with running(tls=True) as server, server.connect() as sock:
        assert not is_open(sock, 3)


# -- what ends a request -----------------------------------------------------------------------------------------------

UPGRADE = POST + b"connection: upgrade\r\n"
UNCLEAR = {
    "content-length and transfer-encoding": POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "transfer-encoding and content-length": POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
    "the same length twice": POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"content-length: 3, 3\r\n\r\nabc",
    "a negative length": POST + b"content-length: -1\r\n\r\n",
    "a signed length": POST + b"content-length: +3\r\n\r\nabc",
    "a length in hexadecimal": POST + b"content-length: 0x3\r\n\r\nabc",
    "an empty length": POST + b"content-length:\r\n\r\n",
    "a length no integer holds": POST + b"content-length: 99999999999999999999999\r\n\r\n",
    "another coding": POST + b"transfer-encoding: gzip\r\n\r\nabc",
    "another coding first": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "two lines of codings": POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding last": POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "no coding": POST + b"transfer-encoding:\r\n\r\n0\r\n\r\n",
    "identity": POST + b"transfer-encoding: identity\r\n\r\n",
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/0.9 by name": b"GET / HTTP/0.9\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0 by name": b"GET / HTTP/2.0\r\n\r\n",
    "space before the colon": POST + b"content-length : 3\r\n\r\nabc",
    "bare line feeds": HEAD.replace(b"\r", b"") + b"\n",
    "a bare line feed": HEAD + b"a: b\nc: d\r\n\r\n",
    "a bare carriage return": HEAD + b"a: b\rc: d\r\n\r\n",
    "a folded line": HEAD + b"a: b\r\n c\r\n\r\n",
    "NUL in a value": HEAD + b"a: b\0c\r\n\r\n",
    "NUL in a name": HEAD + b"a\0: b\r\n\r\n",
    "no name": HEAD + b": b\r\n\r\n",
    "no colon": HEAD + b"abc\r\n\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    "no path": b"GET http://x HTTP/1.1\r\n\r\n",
    "a chunk size no integer holds": CHUNKED + b"fffffffffffffffff\r\nabc",
    "a negative chunk size": CHUNKED + b"-1\r\nabc\r\n0\r\n\r\n",
    "a chunk size with a prefix": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a space after the chunk size": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "chunks with bare line feeds": CHUNKED + b"3\nabc\n0\n\n",
    "a line feed in a chunk extension": CHUNKED + b"3;a=\nb\r\nabc\r\n0\r\n\r\n",
    "no end of a chunk": CHUNKED + b"3\r\nabc0\r\n\r\n",
    "content-length in a trailer": CHUNKED + b"0\r\ncontent-length: 5\r\n\r\nhello",
    "an upgrade with a body": UPGRADE + b"upgrade: h2c\r\ncontent-length: 3\r\n\r\nabc",
    "an upgrade with chunks": UPGRADE + b"upgrade: websocket\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", UNCLEAR)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_request_without_a_clear_end_is_refused_and_nothing_after_it_is_read(address, name, in_pieces):
    sent = UNCLEAR[name] + NEXT
    with socket.create_connection(address) as sock:
        if in_pieces:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in (sent[:-40], sent[-40:-20], sent[-20:]):
                sock.sendall(piece)
                time.sleep(0.03)
        else:
            sock.sendall(sent)
        sentence = refused(everything(sock), 400)
    assert ": send" in sentence and b"/next" not in served and b"/" not in served


@pytest.mark.parametrize("size", [b"1", b"0" * 100 + b"1", b"1;a=b", b'1;a="b;c"'])
def test_ordinary_chunks_are_read_and_the_connection_stays(address, size):
    with socket.create_connection(address) as sock:
        for _ in range(3):
            sock.sendall(CHUNKED + (size + b"\r\na\r\n") * 3000 + b"0\r\nx: y\r\n\r\n" + NEXT)
            answers(sock, 2)
    assert served == [b"/read", b"a" * 3000, b"/next"] * 3


def test_trailers_are_no_headers_and_decide_nothing(address):
    with socket.create_connection(address) as sock:
        sock.sendall(CHUNKED + b"1\r\na\r\n0\r\nauthorization: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + NEXT)
        answers(sock, 2)
    assert served == [b"/read", b"a", b"/next"]
    with socket.create_connection(address) as sock:
        sock.sendall(CHUNKED + b"0\r\nconnection: close\r\n\r\n" + NEXT)
        assert everything(sock).count(BODY) == 1


@pytest.mark.parametrize(
    "overhead", [b"0\r\n" + b"x: y\r\n" * 66, b"0\r\nx: " + b"y" * 500_000, b"1;a=" + b"b" * 500_000]
)
def test_too_much_beside_the_body_ends_the_connection(address, overhead):
    with socket.create_connection(address) as sock:
        sock.sendall(CHUNKED + overhead)
        assert "trailers" in refused(everything(sock), 400)
    until(lambda: served == [b"/read", b"gone"])


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"anything/1"])
def test_an_upgrade_is_ignored_but_the_connection_is_not_kept(address, protocol):
    upgrade = b"connection: keep-alive, upgrade\r\nupgrade: " + protocol + b"\r\n\r\n"
    for head, rest in ((HEAD, b""), (HEAD, NEXT), (HEAD + b"content-length: 0\r\n", NEXT)):
        with socket.create_connection(address) as sock:
            sock.sendall(head + upgrade + rest)
            answer = everything(sock)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer and answer.count(BODY) == 1
    with socket.create_connection(address) as sock:  # in a packet of its own, while the answer is made
        sock.sendall(HEAD.replace(b"/ ", b"/slow ") + upgrade)
        time.sleep(0.1)
        sock.sendall(NEXT)
        assert everything(sock).count(BODY) == 1
    assert b"/next" not in served


def test_a_refusal_reaches_a_client_that_sends_on_and_reads_later(address):
    with socket.create_connection(address) as sock:
        sock.sendall(POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\n")
        for _ in range(10):
            sock.sendall(b"x" * 100_000)
            time.sleep(0.01)
        refused(everything(sock), 400)


def test_a_refusal_after_100_continue_was_asked_for_leaves_no_failure(address, caplog):
    with socket.create_connection(address) as sock:
        sock.sendall(POST + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n")
        refused(everything(sock), 400)
    until(lambda: served == [b"/read", b"gone"])
    assert not caplog.records


# -- several requests --------------------------------------------------------------------------------------------------


def test_requests_in_one_piece_are_answered_one_after_the_other(address):
    with socket.create_connection(address) as sock:
        sock.sendall((HEAD + b"\r\n") * 3)
        answers(sock, 3)


def test_a_refusal_waits_for_the_answers_before_it(address):
    slow = HEAD.replace(b"/ ", b"/slow ") + b"\r\n"
    for bad in (b"nonsense\r\n", CHUNKED + b"nonsense\r\n", CHUNKED + b"1\r\na\r\n" + b"0\r\n" + b"x: y\r\n" * 100):
        with socket.create_connection(address) as sock:
            sock.sendall(slow + HEAD + b"\r\n" + bad)
            received = everything(sock)
            assert received.count(BODY) == 2 and received.index(b" 400 ") > received.rindex(BODY), received
            refused(received[received.rindex(BODY) + len(BODY) :], 400)
    assert b"/read" not in served


def test_more_requests_than_may_wait_are_not_read(address):
    with socket.create_connection(address) as sock:
        sock.sendall(HEAD.replace(b"/ ", b"/slow ") + b"\r\n" + (HEAD + b"\r\n") * 100)
        received = everything(sock)
        assert received.count(BODY) == 1 + MAX_PIPELINED and b" 503 " in received and b"retry-after: 1" in received
    assert len(served) == 1 + MAX_PIPELINED


def test_a_body_behind_a_request_being_answered_is_not_late():
    with running(BODY=0.5, HEAD=0.5) as server, server.connect() as sock:
        sock.sendall(HEAD.replace(b"/ ", b"/slow ") + b"\r\n" + POST + b"content-length: 3\r\n\r\na")
        time.sleep(1)
        sock.sendall(b"bc")
        answers(sock, 2)
    assert b"abc" in served


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_with_others_waiting_behind_it_learns_that_its_client_left(reset):
    with running(UNREAD=0.5) as server:
        with server.connect() as sock:
            sock.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
            until(lambda: served == [b"/endless"])
            sock.sendall(HEAD + b"\r\n")
            until(lambda: any(c.pipeline for c in list(server.connections.all)))
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
        until(lambda: served == [b"/endless", b"gone"], 3)
        until(lambda: not server.connections.all)


def test_a_connection_the_client_reset_is_forgotten_at_once():
    with running() as server:
        with server.connect() as sock:
            sock.sendall(HEAD + b"\r\n")
            answers(sock, 1)
            (there,) = map(weakref.ref, server.connections.all)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
        until(lambda: gc.collect() >= 0 and there() is None, 2, "no connection in memory")


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [ServerConfig(max_connections=4, max_connections_per_address=9), ServerConfig(max_connections_per_address=4)],
)
def test_connections_beyond_the_limit_are_told_so(config):
    with running(config) as server, ExitStack() as stack:
        kept = [stack.enter_context(server.connect()) for _ in range(4)]
        until(lambda: len(server.connections.all) == 4)
        for sent in (b"", HEAD + b"\r\n"):
            with server.connect() as sock:
                sock.sendall(sent)
                answer = everything(sock)
                assert "too many connections" in refused(answer, 503) and b"retry-after: 1" in answer
        for sock in kept:  # those there are do not suffer
            sock.sendall(HEAD + b"\r\n")
            answers(sock, 1)
        kept[0].close()
        until(lambda: server.connections.num_admitted == 3)
        with server.connect() as sock:
            sock.sendall(HEAD + b"\r\n")
            answers(sock, 1)
    assert not server.connections.by_address and not server.connections.num_admitted


def test_one_address_leaves_room_for_others():
    shared = Connections(ServerConfig(max_connections=100))
    assert shared.most_per_address == 75
    assert Connections(ServerConfig()).most_per_address > 2048  # a load generator, and whoever asks how the server is


def test_a_crowd_beyond_the_limit_is_cut_without_a_word(monkeypatch):
    monkeypatch.setattr(connection, "MAX_TURNED_AWAY", 2)
    with running(ServerConfig(max_connections=1)) as server, ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(8)]
        until(lambda: server.connections.num_refused == 7)
        time.sleep(0.1)
        assert len(server.connections.all) == 3
        assert is_open(socks[0], 0.1)


@pytest.mark.parametrize("max_idle, left", [(6, 3), (4, 2)])
def test_of_too_many_idle_connections_the_longest_idle_are_closed(monkeypatch, max_idle, left):
    """Half of them may be of one address."""
    monkeypatch.setattr(connection, "SPARED_S", 0.5)
    with running(ServerConfig(max_idle_connections=max_idle)) as server, ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(8)]
        for sock in socks:
            sock.sendall(HEAD + b"\r\n")
            answers(sock, 1)
            time.sleep(0.12)
        until(lambda: len(server.connections.all) == left, 3)
        time.sleep(0.7)
        assert [is_open(sock, 0.05) for sock in socks] == [False] * (8 - left) + [True] * left


def test_whom_a_connection_counts_for():
    assert connection._address(("10.0.0.1", 5)) == connection._address(("::ffff:10.0.0.1", 6)) == "10.0.0.1"
    hosts = "2001:db8::1", "2001:db8::ffff:2", "2001:db9::1"
    first, second, other = (connection._address((host, 5)) for host in hosts)
    assert first == second != other
    assert connection._address(("fe80::1%eth0", 5)) and connection._address(("", 0)) == ""
    assert connection._address(None) is None


def test_clients_without_an_address_are_counted_in_total_only(tmp_path):
    async def main() -> tuple[bytes, int]:
        options = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        options.load()
        http = Http(options, Connections(ServerConfig(max_connections_per_address=1)))
        server = await asyncio.get_running_loop().create_unix_server(http._connection, tmp_path / "s")
        received, clients = b"", [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(3)]
        for reader, writer in clients:
            writer.write(HEAD + b"\r\n")
            received += await reader.readuntil(BODY)
        server.close()
        return received, http.connections.num_admitted

    received, num_admitted = uvloop.run(main())
    assert received.count(b" 200 ") == 3 and num_admitted == 3


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(monkeypatch, caplog):
    limits = [1024, 4096]
    monkeypatch.setattr(run.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(run.resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    allow_open_files(1000)
    assert limits == [1024, 4096]
    allow_open_files(3000)
    assert limits == [3000, 4096] and not caplog.records
    allow_open_files(5000)
    assert limits == [4096, 4096] and "--max-connections" in caplog.text
