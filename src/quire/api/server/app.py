"""The server's endpoints: one table that defines routing, the key each path needs and the OpenAPI document.

`build_app` is called by `run.py`, which puts the guard around it; the guard asks `policy_of`. A plain ASGI application.
It and the guard look endpoints up by the same function, so what the guard allowed is what runs. Must not know sockets,
keys or limits on bytes.
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from quire import __version__
from quire.api.server import chat, completions, invocations, live, models, openapi, operate, render, status, tokens, ui
from quire.api.server.anthropic import messages as anthropic
from quire.api.server.anthropic.errors import AnthropicError
from quire.api.server.calls import Answer, Call, Receive, Scope, Send, Service, read_body
from quire.api.server.errors import ErrorBody, ErrorForm, no_such_path, problem, wrong_method
from quire.api.server.fields import RequestBody
from quire.api.server.live import LiveStream
from quire.api.server.logs import CallRecord
from quire.api.server.ollama import generate as ollama
from quire.api.server.ollama import models as ollama_models
from quire.api.server.ollama.errors import OllamaError
from quire.api.server.sse import EventStream
from quire.frontend.async_llm import AsyncLLM

MAX_QUERY_FIELDS = 64

# No key, a key, an operator's key; "watch": an operator's where there are keys at all.
Policy = Literal["open", "user", "admin", "watch"]


class Endpoint(NamedTuple):
    method: str
    path: str  # may end with {argument}, which stands for the rest of the path
    handler: Callable[[Call], Awaitable[Answer | EventStream | LiveStream]]
    policy: Policy
    summary: str
    body: type[RequestBody] | None = None
    answer: Any = "application/json"  # what it returns: a struct, a list of them, or text of this content type
    streams: bool = False
    stream_type: str = "text/event-stream"
    query: type[msgspec.Struct] | None = None  # what its query string may say
    errors: type[ErrorForm] = ErrorBody  # how its protocol writes errors
    is_page: bool = False  # part of the page that --no-ui turns off


ENDPOINTS = [
    Endpoint("GET", "/", ui.start_page, "open", "The page for people", None, "text/html", is_page=True),
    Endpoint("GET", "/ui/{name}", ui.page_file, "open", "A file of that page", None, "text/javascript", is_page=True),
    Endpoint("GET", "/live", status.live, "open", "The process is up", None, status.Alive),
    Endpoint("GET", "/ready", status.ready, "open", "The engine makes progress", None, status.Alive),
    Endpoint("GET", "/health", status.ready, "open", "The engine makes progress", None, status.Alive),
    Endpoint("GET", "/ping", status.ready, "open", "The engine makes progress", None, status.Alive),
    Endpoint("POST", "/ping", status.ready, "open", "The engine makes progress", None, status.Alive),
    Endpoint("GET", "/version", status.version, "user", "The server's version", None, status.Version),
    Endpoint("GET", "/metrics", status.metrics, "user", "Prometheus metrics", None, "text/plain"),
    Endpoint("GET", "/load", status.load, "user", "Number of requests under way", None, status.Load),
    Endpoint(
        "GET", "/admin/check", status.check, "admin", "Have the engine verify its books", None, status.CheckResult
    ),
    Endpoint("GET", "/v1/models", models.list_models, "user", "The names of the model", None, models.ModelList),
    Endpoint("GET", "/v1/models/{model}", models.get_model, "user", "One name of the model", None, models.ModelCard),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat.chat,
        "user",
        "Answer a conversation",
        body=chat.ChatRequest,
        answer=chat.ChatCompletion,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.completions,
        "user",
        "Continue prompts",
        body=completions.CompletionRequest,
        answer=completions.Completion,
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        anthropic.messages,
        "user",
        "Answer a conversation, in Anthropic's protocol",
        body=anthropic.MessagesRequest,
        answer=anthropic.AnswerMessage,
        streams=True,
        errors=AnthropicError,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        "user",
        "Number of tokens of a conversation, in Anthropic's protocol",
        body=anthropic.CountTokensRequest,
        answer=anthropic.TokenCount,
        errors=AnthropicError,
    ),
    Endpoint(
        "POST",
        "/api/chat",
        ollama.ollama_chat,
        "user",
        "Answer a conversation, in Ollama's protocol",
        body=ollama.OllamaChatRequest,
        answer=ollama.ChatLine,
        streams=True,
        stream_type="application/x-ndjson",
        errors=OllamaError,
    ),
    Endpoint(
        "POST",
        "/api/generate",
        ollama.ollama_generate,
        "user",
        "Answer a prompt, in Ollama's protocol",
        body=ollama.GenerateRequest,
        answer=ollama.GenerateLine,
        streams=True,
        stream_type="application/x-ndjson",
        errors=OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/tags",
        ollama_models.ollama_tags,
        "user",
        "The names of the model, in Ollama's protocol",
        answer=ollama_models.OllamaModelList,
        errors=OllamaError,
    ),
    Endpoint(
        "POST",
        "/api/show",
        ollama_models.ollama_show,
        "user",
        "What the model can do, in Ollama's protocol",
        body=ollama_models.ShowRequest,
        answer=ollama_models.ModelCardOfOllama,
        errors=OllamaError,
    ),
    Endpoint(
        "GET",
        "/api/version",
        ollama_models.ollama_version,
        "user",
        "The server's version, in Ollama's protocol",
        answer=ollama_models.OllamaVersion,
        errors=OllamaError,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokens.tokenize,
        "user",
        "Token ids of text",
        body=tokens.TokenizeRequest,
        answer=tokens.TokenizeAnswer,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokens.detokenize,
        "user",
        "Text of token ids",
        body=tokens.DetokenizeRequest,
        answer=tokens.DetokenizeAnswer,
    ),
    Endpoint("GET", "/tokenizer_info", tokens.tokenizer_info, "user", "The tokenizer", None, tokens.TokenizerInfo),
    Endpoint(
        "POST",
        "/v1/chat/completions/render",
        render.render_chat,
        "user",
        "The prompt of a conversation, without an answer",
        body=chat.ChatRequest,
        answer=render.Rendered,
    ),
    Endpoint(
        "POST",
        "/v1/completions/render",
        render.render_completions,
        "user",
        "Prompts as token ids, without answers",
        body=completions.CompletionRequest,
        answer=list[render.Rendered],
    ),
    Endpoint(
        "POST",
        "/invocations",
        invocations.invoke,
        "user",
        "Answer a conversation or continue prompts",
        body=invocations.Invocation,
        streams=True,
    ),
    Endpoint(
        "GET",
        "/v1/engine/live",
        live.live_engine,
        "watch",
        "What the engine does, as server-sent events",
        query=live.LiveParameters,
        answer="text/event-stream",
    ),
    Endpoint("GET", "/server_info", operate.server_info, "admin", "Options in effect", None, operate.ServerInfo),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        operate.reset_prefix_cache,
        "admin",
        "Forget cached prompts",
        answer=operate.Reset,
        query=operate.ResetParameters,
    ),
    Endpoint(
        "POST",
        "/pause",
        operate.pause,
        "admin",
        "Let new requests wait",
        answer=operate.Status,
        query=operate.PauseParameters,
    ),
    Endpoint("POST", "/resume", operate.resume, "admin", "Let requests run again", None, operate.Status),
    Endpoint("GET", "/is_paused", operate.is_paused, "admin", "Whether requests wait", None, operate.Paused),
    Endpoint(
        "POST",
        "/sleep",
        operate.sleep,
        "admin",
        "Give the device's memory back",
        answer=operate.Sleeping,
        query=operate.SleepParameters,
    ),
    Endpoint("POST", "/wake_up", operate.wake_up, "admin", "Take it again", None, operate.Sleeping),
    Endpoint("GET", "/is_sleeping", operate.is_sleeping, "admin", "Whether it sleeps", None, operate.Sleeping),
    Endpoint(
        "POST",
        "/abort_requests",
        operate.abort_requests,
        "admin",
        "End requests",
        body=operate.AbortRequest,
        answer=operate.Aborted,
    ),
    Endpoint("GET", "/openapi.json", openapi.document, "user", "This description, for programs"),
    Endpoint("GET", "/docs", openapi.page, "user", "This description, for people", None, "text/html"),
]

TRACED = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.streams)  # those that generate

# How errors are written below a path, or beside it.
_FORMS = [(endpoint.path, endpoint.errors) for endpoint in ENDPOINTS]
_FORMS += [(folder, endpoint.errors) for endpoint in ENDPOINTS if (folder := endpoint.path.rpartition("/")[0])]

_BY_PATH: dict[str, dict[str, Endpoint]] = {}
_BY_PREFIX: dict[str, dict[str, Endpoint]] = {}
for _endpoint in ENDPOINTS:
    _prefix, _brace, _ = _endpoint.path.partition("{")
    (_BY_PREFIX if _brace else _BY_PATH).setdefault(_prefix, {})[_endpoint.method] = _endpoint


def find(path: str) -> tuple[dict[str, Endpoint], str]:
    """(endpoints at this path by method, the path's argument); no endpoints where there is no such path."""
    if path in _BY_PATH:
        return _BY_PATH[path], ""
    for prefix, methods in _BY_PREFIX.items():
        if path.startswith(prefix) and len(path) > len(prefix):
            return methods, path[len(prefix) :]
    return {}, ""


def _pick(methods: dict[str, Endpoint], method: str) -> Endpoint | None:
    return methods.get("GET" if method == "HEAD" else method)


def _is_page(methods: dict[str, Endpoint]) -> bool:
    return any(endpoint.is_page for endpoint in methods.values())


def policy_of(method: str, path: str) -> Policy | None:
    """Who may call; None where there is no such endpoint. The guard then asks for a key all the same, so that nobody
    learns without one which paths exist."""
    endpoint = _pick(find(path)[0], method)
    return endpoint.policy if endpoint is not None else None


def errors_of(path: str) -> type[ErrorForm]:
    """How errors are written at a path, whatever the method; at one that does not exist, as at the one it continues,
    or at the first one beside it."""
    methods, _ = find(path)
    for endpoint in methods.values():
        return endpoint.errors
    return next((errors for start, errors in _FORMS if path.startswith(start + "/")), ErrorBody)


def template_of(path: str) -> str:
    """The path as the table has it, and one word for all that it has not: what metrics call it."""
    methods, _ = find(path)
    return next((endpoint.path for endpoint in methods.values()), "none")


def build_app(llm: AsyncLLM, served_names: Sequence[str], has_page: bool = True) -> "App":
    """The application. `served_names`: what requests may call the model; the first is used where they name none.

    `has_page`: whether it serves the page for people."""
    names = list(served_names)
    model_hash = hashlib.sha256(llm.model.config.model.model.encode()).hexdigest()[:8]
    shown = [endpoint for endpoint in ENDPOINTS if has_page or not endpoint.is_page]
    return App(Service(llm, names, openapi.build(shown), f"quire-{__version__}-{model_hash}"), has_page)


class App:
    def __init__(self, service: Service, has_page: bool = True) -> None:
        self.service = service
        self.has_page = has_page

    def policy_of(self, method: str, path: str) -> Policy | None:
        """As the function of this name; without a page its paths are none."""
        return policy_of(method, path) if self.has_page or not _is_page(find(path)[0]) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            methods, argument = find(scope["path"])
            if not self.has_page and _is_page(methods):
                methods = {}
            endpoint = _pick(methods, scope["method"])
            if endpoint is not None:
                await self._answer(endpoint, argument, scope, receive, send)
                return
            refusal = wrong_method(sorted(methods)) if methods else no_such_path()
            record = _record(scope)
            record.failed(refusal.error)
            await Answer.error(refusal, errors_of(scope["path"]), record.request_id)(receive, send)

    async def _answer(self, endpoint: Endpoint, argument: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive) if endpoint.body is not None else b""
        if body is None:
            return  # the client left
        record = _record(scope)
        query = _query(scope) if endpoint.query is not None else {}
        call = Call(self.service, record, receive, body, argument, query, scope.get("headers", ()), endpoint.errors)
        answer: Answer | EventStream | LiveStream
        try:
            answer = await endpoint.handler(call)
        except Exception as error:
            call.abort()
            failure = problem(error, call.request_id)
            record.failed(failure.error, getattr(error, "hint", ""))
            answer = Answer.error(failure, endpoint.errors, call.request_id)
        try:
            await answer(receive, send)
        finally:
            call.abort()


def _record(scope: Scope) -> CallRecord:
    """The guard's; one of its own where there is no guard."""
    return scope.get("state", {}).get("record") or CallRecord(secrets.token_hex(16))


def _query(scope: Scope) -> dict[str, str]:
    """Of a name that comes twice the last value; nothing of a query string with very many."""
    try:
        return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        return {}


def only_metrics(app: App) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An application that answers `/metrics` and nothing else."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics":
            await app(scope, receive, send)
        else:
            await Answer.error(no_such_path())(receive, send)

    return answer


async def _live(receive: Receive, send: Send) -> None:
    """Acknowledges ASGI's messages that the server starts and stops; `run.py` starts and stops the engine."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
