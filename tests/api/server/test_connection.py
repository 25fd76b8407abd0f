"""Heads of requests that never end, on a real socket."""

import asyncio
import gc
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from quire.api.server import connection
from quire.api.server.connection import MAX_HEAD_BYTES, Connection
from quire.api.server.run import Http
from tests.serving import until

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def address(monkeypatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    http = Http(uvicorn.Config(app, port=0, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(http.serve()), daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    yield http.servers[0].sockets[0].getsockname()
    http.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


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
    while received.count(b"\r\n\r\nok") < count:
        part = sock.recv(65536)
        assert part, received
        received += part


def test_a_head_without_end_is_cut_off(address):
    with socket.create_connection(address) as sock:
        sock.sendall(HEAD)
        sent = 0
        try:
            while sent < 4 * MAX_HEAD_BYTES:
                sock.sendall(b"x-%d: " % sent + b"y" * 1000 + b"\r\n")
                sent += 1000
        except OSError:
            pass
        assert everything(sock).startswith(b"HTTP/1.1 431") or sent < 4 * MAX_HEAD_BYTES


def test_one_header_without_end_is_cut_off(address):
    with socket.create_connection(address) as sock:
        sock.sendall(HEAD + b"x: ")
        with pytest.raises(OSError):
            for _ in range(10_000):
                sock.sendall(b"y" * 10_000)


@pytest.mark.parametrize("beginning", [b"", b"G", HEAD, HEAD + b"x: "])
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


def test_requests_in_one_piece_are_answered_one_after_the_other(address):
    with socket.create_connection(address) as sock:
        sock.sendall((HEAD + b"\r\n") * 3)
        answers(sock, 3)


def test_a_connection_the_client_reset_is_forgotten_at_once(address):
    with socket.create_connection(address) as sock:
        sock.sendall(HEAD + b"\r\n")
        answers(sock, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
    until(lambda: gc.collect() >= 0 and not any(type(thing) is Connection for thing in gc.get_objects()), 2, "no connection in memory")
