"""A request is its head and its body: what else a client can put on a connection, tried on a server process.

`tests/api/server/test_connection.py` has the rest: every state's deadline, every way to leave a request's end unclear.
"""

import contextlib
import re
import socket
import time
from collections.abc import Iterator

import pytest
from benchmarks.fuzz_http import check_answers, play, raw_cases
from benchmarks.server_process import memory_bytes, num_files
from hypothesis import HealthCheck, given, settings

from tests.security.conftest import check
from tests.serving import ServerProcess, until

HEAD = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"
KEEP_ALIVE_S = 2
SOME_MB = 8 << 20


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[ServerProcess]:
    with ServerProcess("--executor", "echo:20", "--api-key", "k1", "--keep-alive-s", str(KEEP_ALIVE_S)) as process:
        for _ in range(50):  # what it needs from now on, it has
            process.get("/live")
        yield process
        check("Traceback" not in process.log(), process.log())


@contextlib.contextmanager
def connected(server: ServerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        yield sock


def everything(sock: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            received += part
    return received


def answer_on(sock: socket.socket) -> bytes:
    """One answer, as long as it says it is."""
    received = b""
    size: int | None = None
    while size is None or len(received) < size:
        part = sock.recv(65536)
        check(part, f"the server closed after {received}")
        received += part
        if found := re.search(rb"content-length: (\d+)\r\n(?s:.*?)\r\n\r\n", received):
            size = found.end() + int(found[1])
    return received


def growth(server: ServerProcess, sock: socket.socket, piece: bytes, total_bytes: int) -> int:
    """By how much memory grows, at most, while a client sends this over and over, or until the server ends it."""
    before = most = memory_bytes(server.process.pid)
    with contextlib.suppress(OSError):
        for _ in range(total_bytes // len(piece)):
            sock.sendall(piece)
            most = max(most, memory_bytes(server.process.pid))
    return most - before


ENDLESS = {
    "trailer lines": (b"\r\n0\r\n", b"x-trailer: some value\r\n" * 40_000),
    "one trailer line": (b"\r\n0\r\nx: ", b"y" * 1_000_000),
    "one trailer name": (b"\r\n0\r\n", b"y" * 1_000_000),
    "chunk extensions": (b"\r\n1;", b"a=b;" * 250_000),
    "a chunk size": (b"\r\n", b"0" * 1_000_000),
    "headers": (b"", b"x: y\r\n" * 100_000),
    "empty lines": (b"\r\n0\r\n\r\n", b"\r\n" * 500_000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_finding_4_trailers_without_end_are_held_nowhere_and_end_the_connection(server, name):
    beginning, piece = ENDLESS[name]
    with connected(server) as sock:
        sock.sendall(CHUNKED + beginning)
        grown = growth(server, sock, piece, 160_000_000)
        check(grown < SOME_MB, f"grew by {grown:,} bytes")
        with pytest.raises(OSError):  # it was not waiting for more
            for _ in range(100):
                sock.sendall(piece)
    check(server.get("/live").status_code == 200)


def test_finding_5_trailers_never_become_headers(server):
    models = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    body = b"transfer-encoding: chunked\r\n\r\n0\r\nauthorization: Bearer k1\r\nx-request-id: from-a-trailer\r\n\r\n"
    with connected(server) as sock:
        sock.sendall(models + body)
        answer = everything(sock)
        check(answer.startswith(b"HTTP/1.1 401") and b"from-a-trailer" not in answer, answer)
    with connected(server) as sock:
        headers = b"authorization: Bearer k1\r\nx-request-id: from-a-header\r\n"
        sock.sendall(models + headers + body.replace(b"k1", b"k2"))
        answer = everything(sock)
        check(answer.startswith(b"HTTP/1.1 200") and b"x-request-id: from-a-header" in answer, answer)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"anything"])
def test_finding_6_what_follows_an_upgrade_is_never_a_request(server, protocol):
    upgrade = b"connection: upgrade\r\nupgrade: " + protocol + b"\r\n"
    hidden = b"GET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(server) as sock:
        sock.sendall(HEAD + upgrade + b"\r\n")
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            sock.sendall(hidden)
        answer = everything(sock)
        check(answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer, answer)
        check(answer.count(b"HTTP/1.1 ") == 1, answer)
    for framing in (b"content-length: %d\r\n" % len(hidden), b"transfer-encoding: chunked\r\n"):
        with connected(server) as sock:
            sock.sendall(HEAD.replace(b"GET", b"POST") + upgrade + framing + b"\r\n")
            time.sleep(0.05)
            sock.sendall(hidden)
            answer = everything(sock)
            check(answer.startswith(b"HTTP/1.1 400") and b"without an Upgrade header" in answer, answer)
            check(answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer, answer)
    check("/hidden" not in server.log(), "it was read as a request")


def test_finding_7_a_bare_line_end_does_not_stop_the_clock(server):
    before = num_files(server.process.pid)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(50)]
        for sock in socks:
            sock.sendall(HEAD + b"\r\n")
        for sock in socks:
            check(answer_on(sock).startswith(b"HTTP/1.1 200"))
            sock.sendall(b"\r\n")
        until(lambda: num_files(server.process.pid) <= before, 3 * KEEP_ALIVE_S + 4, "the end of idle connections")


def test_requests_sent_behind_a_slow_one_do_not_grow_memory(server):
    body = b'{"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": true}'
    slow = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k1\r\n"
    slow += b"content-type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(4)]
        for sock in socks:
            sock.sendall(slow + b"content-length: %d\r\n\r\n" % len(body) + body)
        grown = sum(growth(server, sock, b"GET /live HTTP/1.1\r\n\r\n" * 10_000, 2_200_000) for sock in socks)
        check(grown < SOME_MB, f"grew by {grown:,} bytes")
        for sock in socks:
            received = everything(sock)
            check(received.startswith(b"HTTP/1.1 200") and b'"completion_tokens":20' in received, received[:1000])
            check(received.count(b"HTTP/1.1 200") == 17 and received.count(b"HTTP/1.1 503") == 1, received[-1000:])
    check(server.get("/live").status_code == 200)


def test_as_many_connections_as_a_load_generator_opens_are_all_answered_and_given_back(server):
    before = num_files(server.process.pid)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(2048)]
        for _ in range(2):
            for sock in socks:
                sock.sendall(HEAD + b"\r\n")
            for sock in socks:
                check(answer_on(sock).startswith(b"HTTP/1.1 200"))
    until(lambda: num_files(server.process.pid) <= before, 10, "the end of all connections")


def test_connections_beyond_the_limit_are_refused_and_the_others_stay(smollm2):
    with ServerProcess("--executor", "echo", "--max-connections", "20") as server, contextlib.ExitStack() as stack:
        server.client.close()
        socks = [stack.enter_context(connected(server)) for _ in range(60)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(HEAD + b"\r\n")
        answers = [answer_on(sock) for sock in socks]
        served = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200")]
        refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503")]
        check((len(served), len(refused)) == (15, 45), (len(served), len(refused)))  # a quarter is for other addresses
        check(all(b"retry-after" in answer and b"too many connections" in answer for answer in refused), refused[0])
        until(lambda: "connections were refused" in server.log(), 3, "a line in the log")


# -- the fuzzer's cases ------------------------------------------------------------------------------------------------


def test_whatever_a_client_sends_it_gets_answers_or_nothing(server):
    address = ("127.0.0.1", server.port)
    before = num_files(server.process.pid)

    @settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(raw_cases())
    def try_one(case):
        check(not (wrong := check_answers(play(address, case, timeout_s=3))), wrong)

    try_one()
    check(server.get("/live").status_code == 200)
    until(lambda: num_files(server.process.pid) <= before + 1, 3 * KEEP_ALIVE_S + 4, "the end of all connections")


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
LAST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 26\r\n\r\n"
    b'{"error":{"message":"no"}}'
)


def test_answers_are_told_from_what_is_none():
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + OK + STREAM + OK + LAST
    for cut in range(len(whole) + 1):
        check(check_answers(whole[:cut]) == "", whole[:cut])
    for wrong in (
        LAST + OK,
        b"x" + OK,
        OK + b"x" * 20,
        OK.replace(b"1.1", b"1.0"),
        OK.replace(b"content-length: 2", b"a: b"),
        OK.replace(b"2\r", b"-2\r"),
        OK.replace(b"ok", b"o"),  # as long as something follows
        OK.replace(b"content", b"cont ent"),
        OK.replace(b"200 OK", b"500 Oh"),
        STREAM.replace(b"3\r", b"4\r"),
        STREAM.replace(b"3\r", b"x\r"),
        STREAM.replace(b"chunked\r\n", b"chunked\r\ncontent-length: 3\r\n"),
        LAST.replace(b"error", b"other"),
    ):
        check(check_answers(wrong + OK), wrong)


def test_playing_never_hangs():
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, and neither reads nor answers
        started = time.monotonic()
        for case in ([("send", b"x" * 50_000_000)], [("read",), ("pause", 60_000)], [("half_close",)]):
            check(play(deaf.getsockname(), case, timeout_s=0.3) == b"")
        check(time.monotonic() - started < 3)
