"""Traces of a real server, as a collector on this machine gets them: over HTTP or gRPC, in OpenTelemetry's protobuf."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as protocol
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quire.api.server.tracing import Parsing, TimedParser
from quire.frontend.parse import OutputParser
from quire.frontend.tools import hermes
from tests.serving import ROOT, ServerProcess, until

KEY = "a-key"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = ["queue", "prefill", "decode"]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Collector:
    """Keeps what servers send."""

    def __init__(self) -> None:
        self.received: list[protocol.ExportTraceServiceRequest] = []

    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.received)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def trace(self, trace_id: str) -> dict[str, Span]:
        """The spans of a trace by name, the request's own as "request", as soon as it is there. It is sent last."""
        until(lambda: any(is_request(span) for span in self.spans_of(trace_id)), 20, "the trace")
        return {"request" if is_request(span) else span.name: span for span in self.spans_of(trace_id)}

    def spans_of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans() if span.trace_id.hex() == trace_id]


class HttpCollector(Collector):
    def __init__(self) -> None:
        super().__init__()
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf":
                    received.append(protocol.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


class GrpcCollector(Collector, service.TraceServiceServicer):
    def __init__(self) -> None:
        super().__init__()
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(self, self.server)
        self.url = f"grpc://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request, context):
        self.received.append(request)
        return protocol.ExportTraceServiceResponse()


def is_request(span: Span) -> bool:
    return span.kind == Span.SPAN_KIND_SERVER


def attributes(span: Span) -> dict:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> Iterator[list[str]]:
    """Of a server that says what it was told, 100 tokens a second, and sends its spans soon."""
    template = tmp_path_factory.mktemp("traces") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_SERVICE_NAME", "in-tests")
        yield [
            "smollm2", "--executor", "echo:100", "--max-model-len", "1024", "--served-model-name", "smol",
            "--chat-template", str(template), "--reasoning-parser", "think", "--api-key", KEY,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[HttpCollector]:
    found = HttpCollector()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture(scope="module")
def server(collector, flags, smollm2) -> Iterator[ServerProcess]:
    with ServerProcess(*flags, "--otlp-traces-endpoint", collector.url) as process:
        process.client.headers["authorization"] = f"Bearer {KEY}"
        yield process
        assert "Traceback" not in process.log()


def chat(text: str, **options) -> dict:
    return {"model": "smol", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **options}


def answered(response) -> tuple[str, str]:
    """(trace id, span id) that an answer names."""
    version, trace_id, span_id, flags = response.headers["traceresponse"].split("-")
    assert version == "00" and int(flags, 16) & 1
    return trace_id, span_id


def test_a_chat_is_one_trace_of_its_queue_prefill_and_decode(server, collector):
    before_ns = time.time_ns()
    response = server.post("/v1/chat/completions", chat("Tell me of the sea.", temperature=0.5, seed=7))
    answer = response.json()
    trace_id, span_id = answered(response)
    spans = collector.trace(trace_id)
    assert sorted(spans) == sorted([*PARTS, "parse", "request"])
    request = spans["request"]
    assert request.span_id.hex() == span_id and not request.parent_span_id and request.name == "chat smol"
    assert all(spans[name].parent_span_id == request.span_id for name in PARTS)
    assert request.status.code == Status.STATUS_CODE_UNSET
    ends = [request.start_time_unix_nano]
    for name in PARTS:
        ends += spans[name].start_time_unix_nano, spans[name].end_time_unix_nano
    assert ends == sorted(ends) and before_ns <= ends[0] and ends[-1] <= request.end_time_unix_nano <= time.time_ns()
    decode = spans["decode"]
    assert 0.05 < (decode.end_time_unix_nano - decode.start_time_unix_nano) / 1e9 < 2  # 7 tokens at 100 a second
    said = attributes(request)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "smol",
        "gen_ai.response.model": "smol",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.id": response.headers["x-request-id"],
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": False,
        "gen_ai.request.n": 1,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.prompt_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert said.items() >= expected.items()
    latencies = (
        "time_in_queue time_to_first_token e2e time_in_model_prefill time_in_model_decode time_in_model_inference"
    )
    assert all(0 <= said[f"gen_ai.latency.{name}"] < 5 for name in latencies.split())
    sender = {
        each.key: each.value.string_value for each in collector.received[-1].resource_spans[0].resource.attributes
    }
    assert sender["service.name"] == "in-tests"


def test_a_stream_that_is_parsed_has_a_span_for_that(server, collector):
    response = server.post("/v1/chat/completions", chat("<think>the sea</think> is wide", stream=True))
    assert '"reasoning_content"' in response.text
    spans = collector.trace(answered(response)[0])
    said = attributes(spans["parse"])
    assert said["quire.parse.tool_calls"] == 0 and 0 < said["quire.parse.busy_s"] < 1
    assert spans["parse"].start_time_unix_nano >= spans["decode"].start_time_unix_nano
    assert attributes(spans["request"])["gen_ai.request.stream"] is True


def test_calls_of_tools_are_counted_by_the_parser_that_is_timed():
    parsing = Parsing()
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for answer in (text, text + text, "no call"):
        plain, timed = (OutputParser(None, hermes.Parser([TOOL])) for _ in range(2))
        timed = TimedParser(timed, parsing)
        assert [timed.feed(answer), timed.finish()] == [plain.feed(answer), plain.finish()]
    assert parsing.num_calls == 3 and 0 < parsing.busy_s <= parsing.ended_s - parsing.began_s


def test_prompts_of_a_completion_have_spans_each(server, collector):
    body = {"model": "smol", "prompt": ["The sea", "The sky"], "max_tokens": 2, "n": 2}
    response = server.post("/v1/completions", body)
    trace_id, _ = answered(response)
    request = collector.trace(trace_id)["request"]
    assert request.name == "text_completion smol"
    assert attributes(request)["gen_ai.response.finish_reasons"] == ["length"] * 4
    spans = [span for span in collector.spans_of(trace_id) if span.name == "prefill"]
    assert [attributes(span)["quire.prompt_idx"] for span in spans] == [0, 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", chat("The sea", max_tokens=2)),
        ("/v1/messages", chat("The sea", max_tokens=2, stream=True)),
        (
            "/api/chat",
            {"model": "smol", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}},
        ),
        ("/api/generate", {"model": "smol", "prompt": "The sea", "stream": False, "options": {"num_predict": 2}}),
        ("/invocations", {"prompt": "The sea", "max_tokens": 2}),
    ],
)
def test_other_protocols_are_traced_the_same_way(server, collector, path, body):
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    spans = collector.trace(answered(response)[0])
    said = attributes(spans["request"])
    assert set(spans) >= {*PARTS, "request"} and said["http.route"] == path
    assert said["gen_ai.request.model"] == "smol" and said["gen_ai.usage.output_tokens"] == 2
    assert spans["request"].name == f"{said['gen_ai.operation.name']} smol"


def test_a_callers_trace_is_continued(server, collector):
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=of-the-caller"}
    trace_id, span_id = answered(server.post("/v1/chat/completions", chat("Hello there"), headers=headers))
    assert trace_id == TRACE_ID and span_id != PARENT_ID
    request = collector.trace(TRACE_ID)["request"]
    assert request.parent_span_id.hex() == PARENT_ID and request.trace_state == "vendor=of-the-caller"


def test_a_caller_decides_that_a_trace_is_not_sampled(server, collector):
    trace_id = TRACE_ID[::-1]
    response = server.post(
        "/v1/chat/completions", chat("Hello there"), headers={"traceparent": f"00-{trace_id}-{PARENT_ID}-00"}
    )
    assert response.headers["traceresponse"].startswith(f"00-{trace_id}-") and response.status_code == 200
    collector.trace(answered(server.post("/v1/chat/completions", chat("Hello")))[0])
    assert not collector.spans_of(trace_id)


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", f"00-{'0' * 32}-{PARENT_ID}-01")],
        [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01-more")],
        [("traceparent", "x" * 10_000)],
        [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")] * 2,
        [("traceparent", "é"), ("tracestate", "é=ü,,=")],
    ],
)
def test_a_malformed_context_begins_a_trace_of_its_own(server, headers):
    coded = [(name, value.encode()) for name, value in headers]
    response = server.client.post("/v1/chat/completions", json=chat("Hello", max_tokens=1), headers=coded)
    trace_id, _ = answered(response)
    assert response.status_code == 200 and trace_id not in (TRACE_ID, "0" * 32)


def test_a_long_tracestate_is_dropped_and_the_trace_goes_on(server):
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "a=" + "b" * 5000}
    response = server.post("/v1/chat/completions", chat("Hello", max_tokens=1), headers=headers)
    assert answered(response)[0] == TRACE_ID


def test_only_calls_that_generate_and_have_a_key_are_traced(server, collector):
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    assert "traceresponse" not in server.get("/v1/models", headers=headers).headers
    assert "traceresponse" not in server.get("/health", headers=headers).headers
    headers["authorization"] = "Bearer of-a-stranger"
    refused = server.post("/v1/chat/completions", chat("Hello"), headers=headers)
    assert refused.status_code == 401 and "traceresponse" not in refused.headers


def test_a_call_that_fails_says_why(server, collector):
    response = server.post("/v1/chat/completions", chat("Hello", max_tokens=5000))
    request = collector.trace(answered(response)[0])["request"]
    said = attributes(request)
    assert response.status_code == 400 and said["http.response.status_code"] == 400
    assert request.status.code == Status.STATUS_CODE_ERROR
    assert said["error.type"] == response.json()["error"]["code"] == request.status.message.partition(":")[0]
    assert request.name == "POST /v1/chat/completions"


def test_a_client_that_leaves_ends_its_trace(server, collector):
    trace_id = TRACE_ID.replace("0", "1")
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    body = chat("word " * 200, max_tokens=500, stream=True)
    with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    spans = collector.trace(trace_id)
    assert attributes(spans["request"])["gen_ai.response.finish_reasons"] == ["abort"]
    assert 1 <= attributes(spans["decode"])["gen_ai.usage.output_tokens"] < 500


def test_no_span_holds_a_prompt_an_answer_or_a_key(server, collector):
    trace_id, _ = answered(server.post("/v1/chat/completions", chat("a hidden treasure", stop=["buried gold"])))
    collector.trace(trace_id)
    sent = b"".join(request.SerializeToString() for request in collector.received)
    assert b"treasure" not in sent and b"gold" not in sent and KEY.encode() not in sent


def test_prompts_and_answers_are_sent_over_grpc_when_asked_for(flags, smollm2):
    collector = GrpcCollector()
    with ServerProcess(*flags, "--otlp-traces-endpoint", collector.url, "--otlp-traces-content") as process:
        process.client.headers["authorization"] = f"Bearer {KEY}"
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Where is the treasure?"}]},
        ]
        response = process.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
        answer = response.json()["choices"][0]["message"]["content"]
        response_two = process.post("/v1/completions", {"prompt": "The sea", "max_tokens": 2})
        said = attributes(collector.trace(answered(response)[0])["request"])
        said_two = attributes(collector.trace(answered(response_two)[0])["request"])
        assert process.stop() == 0
    collector.server.stop(None)
    assert json.loads(said["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Where is the treasure?"}]},
    ]
    answers = [{"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "length"}]
    assert json.loads(said["gen_ai.output.messages"]) == answers
    prompts = [{"role": "user", "parts": [{"type": "text", "content": "The sea"}]}]
    assert json.loads(said_two["gen_ai.input.messages"]) == prompts


def test_a_collector_that_never_answers_delays_nothing(flags, smollm2):
    """Neither requests, with a full queue of spans, nor the end of the server."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        patch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ServerProcess(*flags, "--otlp-traces-endpoint", url) as process:
            process.client.headers["authorization"] = f"Bearer {KEY}"
            took_s = []
            for _ in range(12):
                began_s = time.monotonic()
                assert process.post("/v1/chat/completions", chat("Hello", max_tokens=1)).status_code == 200
                took_s.append(time.monotonic() - began_s)
            assert max(took_s) < 10
            began_s = time.monotonic()
            assert process.stop() == 0
            assert time.monotonic() - began_s < 15


def test_without_opentelemetry_one_sentence_says_what_to_install():
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from quire.api.cli import main\n"
        "sys.exit(main(['serve', '--port', '0', '--otlp-traces-endpoint', 'http://127.0.0.1:4318']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr == "quire: --otlp-traces-endpoint needs OpenTelemetry: pip install opentelemetry-exporter-otlp\n"


def test_a_server_without_traces_does_not_import_opentelemetry():
    program = (
        "import sys; from quire.api.server.run import serve\n"
        "from quire.api.server.tracing import open_tracer; from quire.config.server import ServerConfig\n"
        "sys.exit(open_tracer(ServerConfig(), []) is not None or 'opentelemetry' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)
