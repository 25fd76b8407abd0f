"""Traces for OpenTelemetry: a span per request, and in it one each for its queue, prefill, decode and parsing.

`run.py` makes a `Tracer` where --otlp-traces-endpoint asks for one. The guard starts and ends a `Trace` per call, the
handlers tell it what they ask of the engine. Spans are made when a call is over, of times that are kept anyway, and a
thread sends them: a collector that is slow or gone costs spans, never time. Only this file imports OpenTelemetry.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from quire import __version__, env
from quire.api.server.logs import CallRecord, log
from quire.config.server import ServerConfig
from quire.errors import ConfigError, QuireError
from quire.frontend.async_llm import Stream
from quire.frontend.parse import Delta, OutputParser
from quire.params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

    from quire.api.server.calls import Call
    from quire.api.server.fields import SamplingFields

CLOSE_S = 3.0  # time a collector has for the last spans, when the server stops
GRPC_PORT = 4317  # collectors listen there for gRPC, on 4318 for HTTP
MAX_CONTEXT_CHARS = 512  # of a caller's traceparent, and of its tracestate
MAX_TRACED_PROMPTS = 32  # of one call that have spans of their own
MAX_BODY_BYTES = 1 << 18  # larger ones are not read again for the prompts in them
MAX_CONTENT_CHARS = 32_768  # of one message

Headers = list[tuple[bytes, bytes]]


class Tracer:
    """Makes traces of calls, and has them sent."""

    def __init__(self, config: ServerConfig, paths: Collection[str]) -> None:
        """`paths`: where calls are traced. QuireError: OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(config.otlp_traces_endpoint or "")
        except ImportError:
            text = "--otlp-traces-endpoint needs OpenTelemetry: pip install opentelemetry-exporter-otlp"
            raise QuireError(text) from None
        self.paths = frozenset(paths)
        self.shows_content = config.otlp_traces_content
        self.provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.otel = self.provider.get_tracer("quire", __version__)
        self.propagator = TraceContextTextMapPropagator()
        for name in ("opentelemetry.trace", "opentelemetry.attributes"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they would warn of every malformed header
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # and of every attempt to reach a collector

    def start(self, record: CallRecord, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """Starts the trace of a call, if its path is one of those that have traces; headers for its answer."""
        if record.path not in self.paths or record.method != "POST":
            return []
        record.trace = Trace(self, record, self._context(headers))
        return record.trace.headers

    def _context(self, headers: Sequence[tuple[bytes, bytes]]) -> "Context | None":
        """The caller's own trace, which this one is a part of."""
        parents = [value for name, value in headers if name == b"traceparent"]
        if len(parents) != 1 or len(parents[0]) > MAX_CONTEXT_CHARS:
            return None
        states = b",".join(value for name, value in headers if name == b"tracestate")
        carrier = {"traceparent": parents[0].decode("latin-1")}
        if states and len(states) <= MAX_CONTEXT_CHARS:
            carrier["tracestate"] = states.decode("latin-1")
        return self.propagator.extract(carrier)

    def close(self) -> None:
        """Sends what has not been sent yet, if the collector takes it soon enough."""
        sending = threading.Thread(target=self.provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_S)


class Trace:
    """One call's."""

    def __init__(self, tracer: Tracer, record: CallRecord, context: "Context | None") -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self.tracer = tracer
        self.began_ns, self.began_s = time.time_ns(), time.monotonic()
        name = f"{record.method} {record.path}"
        self.span = tracer.otel.start_span(name, context, SpanKind.SERVER, start_time=self.began_ns)
        self.inside = set_span_in_context(self.span)
        self.attributes: dict[str, Any] = {"http.request.method": record.method, "http.route": record.path}
        self.streams: Sequence[Stream] = ()
        self.body = b""  # where prompts are shown
        self.parsing: Parsing | None = None

    @property
    def headers(self) -> Headers:
        """Tells the caller the ids of this span, as W3C's Trace Context wants it."""
        ids = self.span.get_span_context()
        return [(b"traceresponse", f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}".encode())]

    def generates(self, call: "Call", fields: "SamplingFields", params: SamplingParams) -> None:
        """Told before anything is asked of the engine."""
        model = fields.model or call.service.names[0]
        self.span.update_name(f"{fields.operation} {model}")
        self.streams = call.streams
        self.body = call.body if self.tracer.shows_content else b""
        self.attributes |= {
            "gen_ai.operation.name": fields.operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.id": call.request_id,
            "gen_ai.request.stream": bool(fields.stream),
            **_asked(params),
        }

    def answers(self, answer_id: str) -> None:
        self.attributes["gen_ai.response.id"] = answer_id

    def timed(self, make_parser: Callable[[], OutputParser] | None) -> Callable[[], OutputParser] | None:
        """The same parsers, with their time measured."""
        if make_parser is None:
            return None
        parsing = self.parsing = Parsing()
        return lambda: TimedParser(make_parser(), parsing)

    def end(self, record: CallRecord) -> None:
        """Makes the spans of a call that is over."""
        if not self.span.is_recording():
            return  # the caller's trace is not sampled
        try:
            self._end(record)
        except Exception:  # tracing never fails a call
            log.exception("a trace could not be written")

    def _end(self, record: CallRecord) -> None:
        now_s = time.monotonic()
        attributes = self.attributes
        attributes["http.response.status_code"] = record.status
        for idx, stream in enumerate(self.streams[:MAX_TRACED_PROMPTS]):
            self._stream_spans(stream, {"quire.prompt_idx": idx} if len(self.streams) > 1 else {}, now_s)
        if self.parsing is not None and self.parsing.began_s:
            self._child("parse", self.parsing.began_s, self.parsing.ended_s, self.parsing.attributes())
        if self.streams:
            attributes |= _used(record, self.streams, now_s - self.began_s)
        if self.body:
            attributes |= _content(self.body, self.streams)
        self.span.set_attributes(attributes)
        if record.reason or record.status >= 400:
            self._failed(record)
        self.span.end(self._clock_ns(now_s))

    def _failed(self, record: CallRecord) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.span.set_attribute("error.type", record.reason.partition(":")[0] or str(record.status))
        self.span.set_status(Status(StatusCode.ERROR, record.reason or "the client disconnected"))

    def _stream_spans(self, stream: Stream, attributes: dict[str, Any], now_s: float) -> None:
        """A part that never began has no span; the last one that did goes on to the request's end."""
        request = stream.request
        times = request.metrics
        ended_s = times.finished_ts or now_s
        first_s = times.first_token_ts or ended_s
        scheduled_s = min(times.scheduled_ts or ended_s, first_s)
        self._child("queue", times.queued_ts, scheduled_s, attributes)
        if times.scheduled_ts:
            tokens = {
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "gen_ai.usage.cache_read.input_tokens": times.num_cached_tokens,
            }
            self._child("prefill", scheduled_s, first_s, attributes | tokens)
        if times.first_token_ts:
            tokens = {"gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in request.choices)}
            self._child("decode", first_s, times.last_token_ts, attributes | tokens)

    def _child(self, name: str, from_s: float, to_s: float, attributes: Mapping[str, Any]) -> None:
        start_ns = self._clock_ns(from_s)
        span = self.tracer.otel.start_span(name, self.inside, attributes=attributes, start_time=start_ns)
        span.end(max(start_ns, self._clock_ns(to_s)))

    def _clock_ns(self, monotonic_s: float) -> int:
        """By the clock on the wall, which may have been set meanwhile: so spans of a trace fit together."""
        return self.began_ns + int((monotonic_s - self.began_s) * 1e9)


class Parsing:
    """When the parsers of a call worked, how long altogether, and how many tool calls they found."""

    def __init__(self) -> None:
        self.began_s = self.ended_s = self.busy_s = 0.0
        self.num_calls = 0

    def add(self, began_s: float, delta: Delta) -> Delta:
        self.ended_s = time.monotonic()
        self.began_s = self.began_s or began_s
        self.busy_s += self.ended_s - began_s
        self.num_calls += sum(call.name is not None for call in delta.calls)
        return delta

    def attributes(self) -> dict[str, Any]:
        return {"quire.parse.busy_s": self.busy_s, "quire.parse.tool_calls": self.num_calls}


class TimedParser(OutputParser):
    """Another parser, with its time measured."""

    def __init__(self, parser: OutputParser, parsing: Parsing) -> None:
        self.parser = parser
        self.parsing = parsing

    def feed(self, text: str) -> Delta:
        return self.parsing.add(time.monotonic(), self.parser.feed(text))

    def finish(self) -> Delta:
        return self.parsing.add(time.monotonic(), self.parser.finish())


def open_tracer(config: ServerConfig, paths: Collection[str]) -> Tracer | None:
    return Tracer(config, paths) if config.otlp_traces_endpoint is not None else None


def _exporter(endpoint: str) -> "SpanExporter":
    """Over gRPC where the address or OpenTelemetry's own variable says so, else over HTTP."""
    url = urlsplit(endpoint)
    protocol = env.otlp_protocol() or ("grpc" if url.scheme.startswith("grpc") or url.port == GRPC_PORT else "")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(url.netloc, insecure=url.scheme in ("http", "grpc"))
    if protocol not in ("", "http/protobuf"):
        raise ConfigError("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf")
    if url.scheme.startswith("grpc"):
        raise ConfigError("--otlp-traces-endpoint begins with grpc, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says HTTP")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    path = url.path if url.path.strip("/") else "/v1/traces"
    return Http(url._replace(path=path).geturl())


def _resource() -> Any:
    """Who sends: OpenTelemetry's own variables may say it (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES)."""
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "quire"}))
    return resource


def _asked(params: SamplingParams) -> dict[str, Any]:
    """What a request asks for, without its text; the number of choices by vLLM's name, too."""
    asked = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.n": params.n,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _used(record: CallRecord, streams: Sequence[Stream], e2e_s: float) -> dict[str, Any]:
    """Tokens, ends and times; times by vLLM's names, of the prompt that took longest."""
    times = max((stream.request.metrics for stream in streams), key=lambda times: times.finished_ts)
    choices = [choice for stream in streams for choice in stream.request.choices]
    used: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in choices],
        "gen_ai.latency.e2e": e2e_s,
    }
    if record.usage is not None:
        usage = record.usage()
        for name in ("input_tokens", "prompt_tokens"):  # the conventions', and vLLM's
            used[f"gen_ai.usage.{name}"] = usage.prompt_tokens
        for name in ("output_tokens", "completion_tokens"):
            used[f"gen_ai.usage.{name}"] = usage.completion_tokens
        used["gen_ai.usage.cache_read.input_tokens"] = usage.prompt_tokens_details.cached_tokens
    if times.scheduled_ts:
        used["gen_ai.latency.time_in_queue"] = times.scheduled_ts - times.queued_ts
    if times.first_token_ts:
        used["gen_ai.latency.time_to_first_token"] = times.first_token_latency
        used["gen_ai.latency.time_in_model_prefill"] = times.first_token_ts - times.scheduled_ts
        used["gen_ai.latency.time_in_model_decode"] = times.last_token_ts - times.first_token_ts
        used["gen_ai.latency.time_in_model_inference"] = times.last_token_ts - times.scheduled_ts
    return used


def _content(body: bytes, streams: Sequence[Stream]) -> dict[str, str]:
    """What was asked and answered, in the form that the conventions give messages."""
    answers = [
        _message("assistant", "".join(choice.texts)) | {"finish_reason": choice.finish_reason or "error"}
        for stream in streams
        for choice in stream.request.choices
    ]
    found = {"gen_ai.output.messages": msgspec.json.encode(answers).decode()}
    if len(body) <= MAX_BODY_BYTES:
        found["gen_ai.input.messages"] = msgspec.json.encode(_prompts(msgspec.json.decode(body))).decode()
    return found


def _prompts(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a body in any protocol: all have `messages`, or a `prompt`."""
    if "messages" in values:
        return [_message(str(message.get("role")), message.get("content")) for message in values["messages"]]
    prompt = values.get("prompt")
    return [_message("user", each) for each in (prompt if isinstance(prompt, list) else [prompt])]


def _message(role: str, content: Any) -> dict[str, Any]:
    """Of what is no text only the kind is told."""
    pieces = content if isinstance(content, list) else [content]
    parts = []
    for piece in pieces:
        text = piece.get("text") if isinstance(piece, dict) else piece
        if isinstance(text, str):
            parts.append({"type": "text", "content": text[:MAX_CONTENT_CHARS]})
        elif isinstance(piece, dict):
            parts.append({"type": str(piece.get("type"))[:MAX_CONTENT_CHARS]})
    return {"role": role, "parts": parts}
