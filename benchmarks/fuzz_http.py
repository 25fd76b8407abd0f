"""Raw-socket cases for the fuzzer: what a hostile client puts on a connection, playing it, and reading what came back.

Used by `benchmarks/fuzz.py` and the tests. Knows HTTP/1.1, and of this server only a few paths and a key to ask with.
"""

import contextlib
import json
import re
import select
import socket
import struct
import time

from hypothesis import strategies as st

QUIET_S = 0.1  # a server that sends nothing for this long after the last action has nothing more to send
ENOUGH_BYTES = 64 << 20  # of answers, after which reading stops

# One thing a client does: ("send", bytes), ("pause", milliseconds), ("read",), ("half_close",) or ("reset",).
Action = tuple[str] | tuple[str, bytes] | tuple[str, int]
Case = list[Action]  # plain values, which can be written down and read again

# ---------------------------------------------------------------- what is sent

# HEAD is left out: without knowing the request, its answers look as if their bodies were cut off.
METHODS = [b"GET", b"POST", b"OPTIONS", b"PUT", b"DELETE", b"CONNECT", b"PRI", b"SOURCE", b"get", b"G\0T", b"", b"FOO"]
ORDINARY_TARGETS = [
    b"/live",
    b"/ready",
    b"/v1/models",
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/tokenize",
    b"/metrics",
    b"/nothing",
]
TARGETS = [
    *ORDINARY_TARGETS,
    b"*",
    b"",
    b"//",
    b"http://x/live",
    b"http://x",
    b"x:80",
    b"/%00",
    b"/%ff%fe",
    b"/live?a=b&a",
    b"/live#x",
    b"/\xff",
    b"/" + b"a" * 17_000,
    b"/ live",
]
VERSIONS = [b"HTTP/1.1"] * 8 + [
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/1.2",
    b"HTTP/11.1",
    b"RTSP/1.0",
    b"ICE/1.0",
    b"http/1.1",
    b"",
]
LINE_ENDS = [b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n", b"\n\r", b""]
ORDINARY_HEADERS = [
    b"host: y",
    b"authorization: Bearer wrong",
    b"x-request-id: a b",
    b"x-request-id: abc",
    b"content-type: text/plain",
    b"accept: */*",
    b"origin: http://evil",
    b"expect: 100-continue",
    b"connection: close",
    b"connection: keep-alive",
    b"a: \xff\xfe",
    b"te: trailers",
]
HEADERS = [
    *ORDINARY_HEADERS,
    b"authorization: Bearer k1",
    b"content-type: application/json",
    b"connection: upgrade",
    b"connection: upgrade, close",
    b"upgrade: h2c",
    b"upgrade: websocket",
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    b"http2-settings: AAMAAABkAAQAAP__",
    b"content-length: 0",
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: +5",
    b"content-length: 5, 5",
    b"content-length:",
    b"content-length: 99999999999",
    b"content-length: 18446744073709551615",
    b"content-length: 99999999999999999999999",
    b"content-length : 5",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked, gzip",
    b"transfer-encoding: identity",
    b"transfer-encoding: \x0bchunked",
    b"transfer-encoding:",
    b"Transfer-Encoding: CHUNKED ",
    b"trailer: authorization",
    b" folded",
    b"\tfolded",
    b": nameless",
    b"no colon",
    b"a: b\0c",
    b"a\0: b",
    b"a: b\rc: d",
    b"a: b\nc: d",
    b"x: " + b"y" * 40_000,
    b"x: " + b"y" * 70_000,
    b"\r\n".join([b"x: y"] * 130),
]
BODIES = [
    b"",
    b"{}",
    b"hello",
    b"\0",
    b"[" * 70,
    b'{"prompt": "a", "max_tokens": 2}',
    b'{"prompt": "a", "max_tokens": 2, "stream": true}',
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}',
    b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"a" * 70_000,
]
CHUNK_SIZES = [b"%x"] * 8 + [
    b"%X",
    b"000%x",
    b"%x;a=b",
    b'%x;a="b;c"',
    b"%x ",
    b"0x%x",
    b"-%x",
    b"+%x",
    b"%xg",
    b"%xffffffffffffffff",
    b"%x;" + b"e" * 70_000,
]
TRAILERS = [
    b"authorization: Bearer k1",
    b"x-request-id: trailer",
    b"content-length: 3",
    b"transfer-encoding: chunked",
    b"connection: close",
    b"connection: upgrade",
    b"upgrade: h2c",
    b"host: z",
    b"no colon",
    b"a: b\0",
    b"t: " + b"v" * 70_000,
    b"\r\n".join([b"t: v"] * 70),
]
JUNK = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n" * 100,
    b"\0",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b" ",
    b"\r\n" * 40_000,
]


@st.composite
def _heads(draw: st.DrawFn, framing: list[bytes], has_body: bool) -> bytes:
    if draw(st.booleans()):  # every other head is an ordinary one, so that the server goes on to what follows it
        method = b"POST" if has_body else b"GET"
        lines = [b"%s %s HTTP/1.1" % (method, draw(st.sampled_from(ORDINARY_TARGETS))), b"host: localhost", *framing]
        if draw(st.booleans()):
            lines += [b"authorization: Bearer k1", b"content-type: application/json"]
        lines += draw(st.lists(st.sampled_from(ORDINARY_HEADERS), max_size=2))
        return b"".join(line + b"\r\n" for line in [*lines, b""])
    request_line = [draw(st.sampled_from(METHODS)), draw(st.sampled_from(TARGETS)), draw(st.sampled_from(VERSIONS))]
    others = draw(st.lists(st.sampled_from(HEADERS), max_size=5))
    lines = [b" ".join(request_line), b"host: localhost", *framing, *others]
    return b"".join(line + draw(st.sampled_from(LINE_ENDS)) for line in [*lines, b""])


@st.composite
def _chunks(draw: st.DrawFn) -> bytes:
    ends = st.just(b"\r\n") if draw(st.booleans()) else st.sampled_from(LINE_ENDS)
    sizes = st.just(b"%x") if draw(st.booleans()) else st.sampled_from(CHUNK_SIZES)
    bodies = [body for body in draw(st.lists(st.sampled_from(BODIES), max_size=3)) if body]
    chunks = [draw(sizes) % len(body) + draw(ends) + body + draw(ends) for body in bodies]
    trailers = [line + draw(ends) for line in draw(st.lists(st.sampled_from(TRAILERS), max_size=2))]
    return b"".join([*chunks, b"0", draw(ends), *trailers, draw(ends)])


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["bare", "length", "wrong length", "chunked", "upgrade"]))
    if kind in ("bare", "upgrade"):
        body = b""
    elif kind == "chunked":
        body = draw(_chunks())
    else:
        body = draw(st.sampled_from(BODIES))
    error = draw(st.integers(-2, 2)) if kind == "wrong length" else 0
    framing = {
        "bare": [],
        "length": [b"content-length: %d" % len(body)],
        "wrong length": [b"content-length: %d" % max(0, len(body) + error)],
        "chunked": [b"transfer-encoding: chunked"],
        "upgrade": [b"connection: upgrade", b"upgrade: h2c"],
    }[kind]
    return draw(_heads(framing, bool(body))) + body


@st.composite
def raw_cases(draw: st.DrawFn) -> Case:
    """What one client does on one connection: good and bad requests, cut anywhere, with pauses and reads between, and
    how it leaves."""
    kinds = st.one_of(_requests(), _requests(), st.sampled_from(JUNK), st.binary(max_size=40))
    parts = draw(st.lists(kinds, min_size=1, max_size=4))
    if draw(st.integers(0, 9)) == 0:
        parts *= 30  # many at once
    stream = b"".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    case: Case = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)]):
        case.append(("send", stream[start:end]))
        between = draw(st.sampled_from(["nothing", "nothing", "pause", "read"]))
        if between == "pause":
            case.append(("pause", draw(st.integers(1, 5))))
        elif between == "read":
            case.append(("read",))
    leaving = draw(st.sampled_from(["", "", "", "half_close", "reset"]))
    return [*case, (leaving,)] if leaving else case


# ---------------------------------------------------------------- playing it


def play(address: tuple[str, int], case: Case, timeout_s: float = 5.0) -> bytes:
    """Plays a case on a connection of its own; what came back until the server closed, fell silent, or time was up."""
    deadline_s = time.monotonic() + timeout_s
    received = bytearray()
    with socket.socket() as sock:
        sock.settimeout(timeout_s)
        sock.connect(address)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # the server may close at any time
            for action in case:
                match action:
                    case ("send", bytes(data)):
                        _send(sock, data, received, deadline_s)
                    case ("pause", int(ms)):
                        time.sleep(min(ms / 1000, max(0.0, deadline_s - time.monotonic())))
                    case ("read",):
                        _read(sock, received, min(deadline_s, time.monotonic() + 0.005))
                    case ("half_close",):
                        sock.shutdown(socket.SHUT_WR)
                    case ("reset",):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return bytes(received)
                    case _:
                        raise ValueError(f"no action: {action!r:.100}")
        _read(sock, received, deadline_s)
    return bytes(received)


def _send(sock: socket.socket, data: bytes, received: bytearray, deadline_s: float) -> None:
    """All of it, reading meanwhile, so that neither side waits for the other."""
    rest = memoryview(data)
    while rest and (left_s := deadline_s - time.monotonic()) > 0:
        readable, writable, _ = select.select([sock], [sock], [], left_s)
        if writable:
            rest = rest[sock.send(rest[:65536]) :]
        if readable and not _take(sock, received):
            return


def _read(sock: socket.socket, received: bytearray, deadline_s: float) -> None:
    """Until the server closes or says nothing for a while."""
    with contextlib.suppress(OSError):
        while (left_s := deadline_s - time.monotonic()) > 0 and len(received) < ENOUGH_BYTES:
            readable, _, _ = select.select([sock], [], [], min(left_s, QUIET_S))
            if not readable or not _take(sock, received):
                return


def _take(sock: socket.socket, received: bytearray) -> bool:
    """Whether the server may still say something."""
    part = sock.recv(65536)
    received += part
    return bool(part)


# ---------------------------------------------------------------- reading what came back

_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [\x20-\x7e]*")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\t\x80-\xff]*)")
_LEAKS = re.compile(rb"Traceback|object at 0x|\.py\"|site-packages")


def check_answers(received: bytes) -> str:
    """What is wrong with this as a sequence of HTTP/1.1 answers, the last of which may be cut; "" when nothing is."""
    rest = received
    is_last = False
    while rest:
        if is_last:
            return f"something follows an answer that said connection: close: {rest[:100]!r}"
        head, end, rest = rest.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        if not end:
            beginning = b"HTTP/1.1 "
            fits = lines[0].startswith(beginning) or beginning.startswith(lines[0])
            return "" if fits else f"no answer begins like this: {head[:100]!r}"
        if not (status_line := _STATUS_LINE.fullmatch(lines[0])):
            return f"no status line: {lines[0][:100]!r}"
        fields = [_HEADER.fullmatch(line) for line in lines[1:]]
        if not all(fields):
            return f"no header line: {lines[1 + fields.index(None)][:100]!r}"
        headers = [(field[1].lower(), field[2]) for field in fields if field]
        status = int(status_line[1])
        problem, body, rest = _body_of(status, headers, rest)
        is_last = (b"connection", b"close") in headers
        problem = problem or _wrong_with(status, dict(headers), body)
        if problem:
            return problem
    return ""


def _body_of(status: int, headers: list[tuple[bytes, bytes]], rest: bytes) -> tuple[str, bytes | None, bytes]:
    """(what is wrong, the body or None where it is cut, what follows it)"""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if status < 200 or status in (204, 304):
        return "a body is announced where none can be" if codings else "", b"", rest
    if len(lengths) + len(codings) != 1:
        return f"its end is unclear: {lengths + codings}", None, b""
    if codings:
        return _chunked_body(rest) if codings == [b"chunked"] else (f"coding {codings[0]!r}", None, b"")
    if not lengths[0].isdigit():
        return f"a length of {lengths[0]!r}", None, b""
    length = int(lengths[0])
    return "", rest[:length] if len(rest) >= length else None, rest[length:]


def _chunked_body(rest: bytes) -> tuple[str, bytes | None, bytes]:
    body = b""
    while True:
        line, end, after = rest.partition(b"\r\n")
        if not end:
            is_cut = re.fullmatch(rb"[0-9a-fA-F]*\r?", line)
            return "" if is_cut else f"no chunk size: {line[:50]!r}", None, b""
        if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", line):
            return f"no chunk size: {line[:50]!r}", None, b""
        size = int(line, 16)
        chunk, close, rest = after[:size], after[size : size + 2], after[size + 2 :]
        if not b"\r\n".startswith(close):
            return f"a chunk does not end where it says: {close!r}", None, b""
        if len(close) < 2:
            return "", None, b""
        if not size:
            return "", body, rest
        body += chunk


def _wrong_with(status: int, headers: dict[bytes, bytes], body: bytes | None) -> str:
    """What no client should see, however it asked."""
    if status >= 500 and status != 503:
        return f"status {status}: {body!r:.300}"
    if body is None:
        return ""
    if _LEAKS.search(body):
        return f"tells of the server's insides: {body!r:.300}"
    if status >= 400:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"status {status} without an error a client can read: {body!r:.300}"
        if not message or headers.get(b"content-type") != b"application/json":
            return f"status {status} with an error of another kind: {body!r:.300}"
    return ""
