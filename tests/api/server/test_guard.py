"""The guard in front of the endpoints, around a toy app: keys, limits, request ids, CORS and the log."""

import asyncio
import json
import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.server import guard as guard_module
from quire.api.server import json_cost as json_cost_module
from quire.api.server import keys as keys_module
from quire.api.server import logs
from quire.api.server.errors import ErrorDetail
from quire.api.server.generation import CachedTokens, Usage
from quire.api.server.guard import Guard
from quire.api.server.json_cost import JsonCost, json_cost
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.utils.json_lines import JsonFormatter

POLICIES = {("GET", "/live"): "open", ("POST", "/echo"): "user", ("POST", "/reload"): "admin"}
JSON = ("content-type", "application/json")
LAST = object()  # a client that sends no more, and stays


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    messages: list[dict] = field(default_factory=list)

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


async def echo(scope, receive, send):
    """Sends back what came, in pieces; /fail raises before the answer, /break in the middle of it."""
    if scope["path"] == "/fail":
        raise KeyError("/secret/path at 0x7f00")
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message.get("more_body", False)
    scope["state"]["record"].usage = lambda: Usage(3, 4, 7, CachedTokens(0))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    for piece in (scope["state"]["record"].request_id.encode(), b" ", body):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        if scope["path"] == "/break":
            raise KeyError("too late")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def call(method: str, path: str, headers=(), body=(), app=echo, client=None, guard=None, **options) -> Reply:
    """One HTTP call. `body`: bytes, or the chunks of one that is sent without saying its length."""
    guard = guard or Guard(app, lambda method, path: POLICIES.get((method, path)), ServerConfig(**options))
    chunks = [body] if isinstance(body, bytes) else list(body) or [b""]
    lines = [(name.encode(), value.encode()) for name, value in headers]
    if isinstance(body, bytes):
        lines.append((b"content-length", b"%d" % len(body)))
    elif body:
        lines.append((b"transfer-encoding", b"chunked"))
    reply = Reply()

    async def receive():
        if not chunks:
            await asyncio.sleep(3600)
        chunk = chunks.pop(0)
        if chunk is LAST:
            await asyncio.sleep(3600)
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message):
        reply.messages.append(message)
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message["body"]

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": lines, "client": client}
    asyncio.run(guard(scope, receive, send))
    return reply


def post(body=b"{}", headers=(JSON,), path="/echo", **options) -> Reply:
    return call("POST", path, headers, body, **options)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}"), JSON]


# -- keys --------------------------------------------------------------------------------------------------------------


def test_without_keys_everybody_may_call():
    assert post().status == 200


@pytest.mark.parametrize("path", ["/echo", "/unknown", "/live/", "//live", "/LIVE"])
def test_with_keys_everything_but_liveness_needs_one(path):
    reply = call("GET", path, api_key=["k1"])
    assert reply.status == 401
    assert reply.error["code"] == "invalid_api_key" and reply.headers["www-authenticate"] == "Bearer"
    assert call("GET", "/live", body=b"", api_key=["k1"]).status == 200


def test_a_path_nobody_listed_needs_a_key_for_every_method():
    for method in ("GET", "POST", "OPTIONS", "TRACE", "WHATEVER"):
        assert call(method, "/unknown", api_key=["k1"]).status == 401
        assert call(method, "/live" if method != "GET" else "/other", api_key=["k1"]).status == 401


def test_any_of_the_keys_opens(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for the team\n\nk3\n k4 \n")
    for key in ("k1", "k2", "k3", "k4"):
        assert post(headers=bearer(key), api_key=["k1", "k2"], api_key_file=str(file)).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer ",
        "Bearer k",
        "Bearer k11",
        "Bearer K1",
        "Basic k1",
        "k1",
        "Bearer k1,k2",
        "Bearer k1 k2",
        "bearerk1",
        "Bearer # for",
    ],
)
def test_what_is_no_key_stays_outside(header):
    assert post(headers=[("authorization", header), JSON], api_key=["k1", "k2"]).status == 401


def test_the_scheme_may_be_written_in_any_case():
    assert post(headers=[("authorization", "bearer k1"), JSON], api_key=["k1"]).status == 200


def test_a_key_may_come_as_anthropics_clients_send_it():
    keys = {"api_key": ["k1", "k2"], "admin_api_key": "root"}
    for path, key in (("/echo", "k1"), ("/echo", "root"), ("/reload", "root"), ("/echo", " k2 ")):
        assert post(path=path, headers=[("x-api-key", key), JSON], **keys).status == 200
    for path, key in (("/echo", "k3"), ("/echo", ""), ("/echo", "Bearer k1"), ("/reload", "k1"), ("/unknown", "k3")):
        assert post(path=path, headers=[("x-api-key", key), JSON], **keys).status == 401


def test_of_two_keys_one_must_be_valid():
    def asked(token: str, key: str) -> int:
        return post(headers=[*bearer(token), ("x-api-key", key)], api_key=["k1"]).status

    assert (asked("k1", "other"), asked("other", "k1"), asked("other", "another")) == (200, 200, 401)


def test_a_call_with_two_keys_is_of_the_bearers(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("k1 label=one\nk2 label=two\n")
    with caplog.at_level(logging.INFO, logger="quire.server"):
        post(headers=[*bearer("k1"), ("x-api-key", "k2")], api_key_file=str(file))
        post(headers=[*bearer("none"), ("x-api-key", "k2")], api_key_file=str(file))
    assert [record.fields["key"] for record in caplog.records] == ["one", "two"]


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []
    real = keys_module.hmac.compare_digest

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((len(given), len(key)))
        return real(given, key)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    for key in ("k1", "nothing like it", ""):
        compared.clear()
        post(headers=bearer(key), api_key=["k1", "a-much-longer-key"])
        assert compared == [(32, 32), (32, 32)]


def test_operators_paths_need_the_operators_key():
    keys = {"api_key": ["k1"], "admin_api_key": "root"}
    assert post(path="/reload", headers=bearer("k1"), **keys).status == 401
    assert post(path="/reload", **keys).status == 401
    assert post(path="/reload", headers=bearer("root"), **keys).status == 200
    assert post(headers=bearer("root"), **keys).status == 200


def test_operators_paths_are_closed_where_there_is_no_operators_key():
    assert post(path="/reload").status == 403
    assert post(path="/reload", headers=bearer("k1"), api_key=["k1"]).status == 403


def test_an_operators_key_alone_leaves_other_paths_open():
    assert post(admin_api_key="root").status == 200
    assert post(path="/reload", admin_api_key="root").status == 401


@pytest.mark.parametrize("content", ["", "# only a remark\n", "two words\n"])
def test_a_key_file_without_a_key_is_a_mistake_and_not_an_open_door(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError):
        post(api_key_file=str(file))
    with pytest.raises(ConfigError):
        post(api_key_file=str(tmp_path / "missing"))


def test_a_websocket_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(echo, lambda *_: "open", ServerConfig())({"type": "websocket", "path": "/live"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_arrives_whole_however_it_was_cut():
    assert post([b'{"a"', b": ", b"1}"]).body.endswith(b' {"a": 1}')
    assert post(b'{"a": 1}').body.endswith(b' {"a": 1}')


def test_a_length_over_the_limit_is_refused_before_reading():
    reads = []

    class Chunks(bytes):  # remembers being read
        def __radd__(self, other):
            reads.append(len(self))
            return other + bytes(self)

    reply = call("POST", "/echo", [JSON, ("content-length", "101")], [Chunks(b"x" * 101)], max_body_bytes=100)
    assert reply.status == 413 and "100 bytes" in reply.error["message"] and "--" not in reply.error["message"]
    assert reply.headers["connection"] == "close" and not reads


def test_the_answer_is_out_before_the_refused_body_is_dropped():
    reply = call("POST", "/echo", [JSON, ("content-length", "300")], [b"x" * 100] * 3, max_body_bytes=100)
    bodies = [m for m in reply.messages if m["type"] == "http.response.body"]
    assert [m["more_body"] for m in bodies] == [True, False] and bodies[0]["body"] == reply.body


def test_a_body_that_does_not_say_its_length_is_counted():
    assert post([b"x" * 60, b"x" * 60, b"x" * 60], max_body_bytes=100).status == 413
    assert post([b'"' + b"x" * 60, b"x" * 38 + b'"'], max_body_bytes=100).status == 200


@pytest.mark.parametrize("length", ["-1", "1e3", "99999999999999999999", "", "0x10"])
def test_a_length_that_is_none_is_refused(length):
    assert call("POST", "/echo", [JSON, ("content-length", length)], [b"x"]).status == 413


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(guard_module, "LINGER_S", 0.05)
    reply = post([b"{", LAST], body_timeout_s=0.1)
    assert reply.status == 408 and "0.1 s" in reply.error["message"] and "--" not in reply.error["message"]


def test_a_client_that_leaves_while_sending_gets_no_answer():
    assert post([b"{", None]).messages == []


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonp"],
)
def test_only_json_is_taken(kind):
    assert post(headers=[("content-type", kind)]).status == 415


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken_however_it_is_written(kind):
    assert post(headers=[("content-type", kind)]).status == 200


def test_headers_are_bounded():
    assert post(headers=[JSON, ("x-much", "x" * 40_000)]).status == 431
    assert post(headers=[JSON, *((f"x-{i}", "y" * 100) for i in range(400))]).status == 431


# -- depth -------------------------------------------------------------------------------------------------------------


def depth(value) -> int:
    if not isinstance(value, (list, dict)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


texts = st.text(alphabet=st.sampled_from('[]{}"\\\n,:ab'), max_size=12)
values = st.recursive(
    texts | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def cost_of(body: bytes, piece_bytes: int = 32_768) -> JsonCost:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_cost_module, "PIECE_BYTES", piece_bytes)
        return asyncio.run(json_cost(body))


@given(value=values, piece=st.integers(1, 40))
def test_depth_is_that_of_the_decoded_value(value, piece):
    assert cost_of(json.dumps(value).encode(), piece).max_depth == depth(value)
    assert cost_of(json.dumps(value, ensure_ascii=False, indent=1).encode(), piece).max_depth == depth(value)


@pytest.mark.parametrize(
    "body", [b"[" * 65, b'{"a":' * 65, b'["]",' * 65, b'["\\"]",' * 65, b'["\\\\",' * 65, b"[[]," * 65]
)
def test_unfinished_and_disguised_nesting_is_seen(body):
    reply = post(body)
    assert reply.status == 400 and "deeper than 64" in reply.error["message"]


@pytest.mark.parametrize(
    "body", [b"[" * 10**6, b"[]" * 500_000, b'"[",' * 250_000, b'"' * 10**6, b'"\\' * 500_000, b"]" * 10**6]
)
def test_depth_is_found_fast_in_hostile_bodies(body):
    import time

    took_s = []
    for _ in range(3):
        started = time.process_time()
        cost_of(body)
        took_s.append(time.process_time() - started)
    assert min(took_s) < 0.5


# -- ids, errors, CORS -------------------------------------------------------------------------------------------------


def test_a_sane_request_id_is_kept_and_reaches_the_app():
    reply = post(headers=[JSON, ("x-request-id", "my-Request_1.2")])
    assert reply.headers["x-request-id"] == "my-Request_1.2" and reply.body.startswith(b"my-Request_1.2 ")


@pytest.mark.parametrize("given_id", ["", "a b", "x" * 129, "a\nb", "é", "<script>", "a;b"])
def test_other_request_ids_are_replaced(given_id):
    first = post(headers=[JSON, ("x-request-id", given_id)]).headers["x-request-id"]
    assert first != given_id and len(first) == 32 and first != post().headers["x-request-id"]


def test_refusals_have_a_request_id_and_openais_shape():
    reply = post(api_key=["k"])
    assert reply.headers["x-request-id"] and reply.headers["content-type"] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert set(reply.error) == {"message", "type", "param", "code"}


def test_an_unforeseen_error_tells_nothing_but_the_request_id():
    reply = call("GET", "/fail", [("x-request-id", "r1")])
    assert reply.status == 500 and "r1" in reply.error["message"]
    assert b"secret" not in reply.body and b"0x" not in reply.body and b"KeyError" not in reply.body


def test_an_error_in_the_middle_of_an_answer_ends_it_short():
    reply = call("POST", "/break", [JSON], b"{}")
    assert reply.status == 200 and reply.messages[-1]["more_body"]


def test_messages_of_a_stream_pass_untouched():
    kept = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            kept.append({"type": "http.response.body", "body": b"x", "more_body": True})
            await send(kept[-1])

    assert all(a is b for a, b in zip(call("GET", "/x", app=app).messages[1:], kept, strict=True))


PREFLIGHT = [
    ("origin", "https://a.example"),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization"),
]


LOCAL_NAMES = (
    "localhost LocalHost:8000 127.0.0.1 127.0.0.1:8000 10.1.2.3 [::1] [::1]:8000 [FE80::1]:1 0.0.0.0:80".split()
)
FOREIGN_NAMES = """
evil.example evil.example:8000 localhost.evil.example 127.0.0.1.evil.example a.localhost localhost@evil.example
evil.example:localhost [::1].evil.example [evil.example] localhost:8000.evil.example 127.0.0.1:80:80 xn--localhost-
""".split()


@pytest.mark.parametrize("host", LOCAL_NAMES)
def test_a_server_on_this_machine_is_called_by_its_own_names(host):
    assert call("GET", "/live", [("host", host)]).status == 200
    assert call("GET", "/live").status == 200  # before HTTP/1.1 nobody sent a name, and browsers always do


@pytest.mark.parametrize("host", FOREIGN_NAMES)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/live"), ("POST", "/echo"), ("GET", "/none"), ("OPTIONS", "/echo")]
)
def test_a_foreign_name_that_was_led_here_is_refused_on_every_path(host, method, path):
    asks = [("origin", "https://a.example"), ("access-control-request-method", "POST")] if method == "OPTIONS" else []
    options = {"allowed_origins": ["https://a.example"], "api_key": ["k"]}
    reply = call(method, path, [("host", host), *asks], **options)
    assert reply.status == 403 and "--allowed-hosts" in reply.error["message"] and host not in reply.error["message"]


def test_names_that_the_operator_allows_are_answered_with_any_port_and_case():
    options = {"allowed_hosts": ["llm.example.org", "other"]}
    for host in ("llm.example.org", "LLM.Example.org:443", "other:80", "localhost"):
        assert call("GET", "/live", [("host", host)], **options).status == 200
    for host in ("example.org", "x.llm.example.org", "llm.example.org.evil.example"):
        assert call("GET", "/live", [("host", host)], **options).status == 403
    assert call("GET", "/live", [("host", "evil.example")], allowed_hosts=["*"]).status == 200


def test_where_other_machines_may_call_any_name_will_do():
    for options in ({"host": "0.0.0.0"}, {"host": "192.168.1.7"}, {"uds": "/tmp/quire.sock"}):
        assert call("GET", "/live", [("host", "llm.example.org")], **options).status == 200
    for host in ("localhost", "127.0.0.9", "::1"):
        assert call("GET", "/live", [("host", "llm.example.org")], host=host).status == 403


def test_cors_is_off_until_asked_for():
    for reply in (call("OPTIONS", "/echo", PREFLIGHT), post(headers=[JSON, ("origin", "https://a.example")])):
        assert not any(name.startswith("access-control") for name in reply.headers)
    assert call("OPTIONS", "/echo", PREFLIGHT, api_key=["k"]).status == 401


@pytest.mark.parametrize(
    ("origins", "answer"), [(["https://a.example", "https://b.example"], "https://a.example"), (["*"], "*")]
)
def test_allowed_origins_may_ask_without_a_key_and_call_with_one(origins, answer):
    options = {"api_key": ["k"], "allowed_origins": origins}
    asked = call("OPTIONS", "/echo", PREFLIGHT, **options)
    assert asked.status == 200 and asked.headers["access-control-allow-origin"] == answer
    assert asked.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in asked.headers["access-control-allow-methods"]
    called = post(headers=[*bearer("k"), ("origin", "https://a.example")], **options)
    assert called.status == 200 and called.headers["access-control-allow-origin"] == answer
    refused = post(headers=[JSON, ("origin", "https://a.example")], **options)
    assert refused.headers["access-control-allow-origin"] == answer


@pytest.mark.parametrize("origin", ["https://c.example", "null", "https://a.example.evil.example", "http://a.example"])
def test_other_origins_are_not_allowed(origin):
    options = {"allowed_origins": ["https://a.example"]}
    asked = call("OPTIONS", "/echo", [("origin", origin), *PREFLIGHT[1:]], **options)
    assert asked.status == 403 and "access-control-allow-origin" not in asked.headers
    assert "access-control-allow-origin" not in post(headers=[JSON, ("origin", origin)], **options).headers


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="quire.server")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "quire.server"]


def test_a_request_is_one_line_with_status_time_and_tokens(lines):
    post(b'{"prompt": "sesame"}', headers=[*bearer("k1"), ("x-request-id", "r7")], api_key=["k1"])
    (line,) = lines()
    assert line.startswith("200 POST /echo ") and line.endswith(" ms 3+4 tokens r7")
    assert "sesame" not in line and "k1" not in line


def test_the_line_has_the_clients_address_and_the_keys_label(lines, tmp_path):
    (tmp_path / "keys").write_text("k1 label=web\n")
    post(headers=[*bearer("k1"), ("x-request-id", "r7")], api_key_file=str(tmp_path / "keys"), client=("10.0.0.7", 99))
    (line,) = lines()
    assert line.endswith(" r7 from 10.0.0.7 as web") and "k1" not in line


@pytest.mark.parametrize(
    ("sent", "options", "reason"),
    [
        (b" " * 200, {"max_body_bytes": 100}, "body_too_large: the body is larger than 100 bytes (--max-body-bytes)"),
        (b"[" * 65, {}, "json_too_deep: the body nests lists and objects deeper than 64 (--max-json-depth)"),
        (b"{}", {"api_key": ["k"]}, "invalid_api_key: a valid API key is needed"),
        (b"{}", {"path": "/reload"}, "no_admin_key: this path is for operators, and this server has no key for them"),
    ],
)
def test_the_line_says_why_a_call_was_refused_and_which_flag_to_change(lines, sent, options, reason):
    reply = post(sent, **options)
    (line,) = lines()
    assert f": {reason}" in line and "--" not in reply.error["message"]


def test_the_reason_holds_nothing_that_was_sent(lines):
    record = logs.CallRecord("r1")
    record.failed(ErrorDetail("there is no model 'sesame \x1b' here: open 'smollm2'", "x", code="model_not_found"))
    assert record.reason == "model_not_found: there is no model … here"


def test_a_key_that_asks_too_often_is_told_when_to_come_back(lines, tmp_path):
    (tmp_path / "keys").write_text("k1 label=web rpm=2\nk2\n")
    options = {"api_key_file": str(tmp_path / "keys")}
    guard = Guard(echo, lambda method, path: "user", ServerConfig(**options))
    replies = [post(headers=bearer("k1"), guard=guard) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    error = replies[-1].error
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 58 <= int(replies[-1].headers["retry-after"]) <= 60
    assert "as web: rate_limit_exceeded: this key may make 2 requests a minute" in lines()[-1]
    assert post(headers=bearer("k2"), guard=guard).status == 200


def test_tokens_that_a_call_did_not_use_are_its_keys_again(tmp_path):
    (tmp_path / "keys").write_text("k1 tpm=100\n")
    totals = []

    async def app(scope, receive, send):
        record = scope["state"]["record"]
        record.limits.reserve(60)
        totals.append(record.limits.limits.tokens.total)
        await echo(scope, receive, send)  # uses 7

    guard = Guard(app, lambda method, path: "user", ServerConfig(api_key_file=str(tmp_path / "keys")))
    for _ in range(6):
        assert post(headers=bearer("k1"), guard=guard).status == 200
    assert totals == [60, 67, 74, 81, 88, 95]
    reply = post(headers=bearer("k1"), guard=guard)
    assert reply.status == 429 and "58 are left" in reply.error["message"]


def test_prompts_are_logged_only_when_told_to(lines):
    post(b'{"prompt": "sesame\\u0041\nopen"}', log_requests=True)
    assert '{"prompt": "sesame' in lines()[0] and "\n" not in lines()[0]


def test_probes_are_logged_only_when_they_fail(lines):
    call("GET", "/live", body=b"")
    assert lines() == []
    call("GET", "/live", [("x-much", "x" * 40_000)])
    assert lines()[0].startswith("431 GET /live")


def test_nobody_can_forge_a_line(lines):
    call("GET", "/a\n200 POST /admin\x1b[31m" + "x" * 500, api_key=["k"])
    assert "\n" not in lines()[0] and "\x1b" not in lines()[0] and len(lines()[0]) < 400


def test_a_client_that_left_is_logged_as_such(lines):
    post([b"{", None])
    assert lines()[0].startswith("499 POST /echo")


def test_json_lines_hold_the_same_as_members():
    fields = {"request_id": "r1", "status": 200, "ms": 1.5}
    record = logging.LogRecord("quire.server", logging.INFO, "", 0, "%s", ("200 GET",), None)
    record.fields = fields
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "200 GET" and entry["level"] == "info" and fields.items() <= entry.items()


def test_the_status_line_tells_what_happened_since_the_last(lines):
    from quire.messages import EngineStats
    from quire.metrics.serving import ServingMetrics

    metrics = ServingMetrics("m")
    status = logs.StatusLine(metrics)
    status.write(5.0)
    assert lines() == []
    stats = EngineStats(num_running=3, num_waiting=2, kv_usage=0.25, prefix_queries=200, prefix_hits=50)
    metrics.engines[0].step(stats, 0.01, 500)
    status.write(5.0)
    assert lines() == ["engine: 3 running, 2 waiting, KV 25%, prefix hits 25%, 0 prompt + 100 output tokens/s"]
    still = {"prefix_queries": 200, "prefix_hits": 50}
    metrics.engines[0].step(EngineStats(**still), 0.01, 0)
    status.write(5.0)
    assert len(lines()) == 1
    drafts = {"num_drafts": 5, "num_draft_tokens": 8, "accepted_drafts": [4, 2]}
    metrics.engines[0].step(EngineStats(num_running=1, **still, **drafts), 0.01, 10)
    status.write(5.0)
    assert lines()[-1].endswith("2 output tokens/s, drafts accepted 75%")
