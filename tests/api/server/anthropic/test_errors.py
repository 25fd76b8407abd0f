"""Errors at Anthropic's paths: the shape and type of all of them, whoever refuses, and what the client makes of it."""

import asyncio
import json

import anthropic
import httpx
import pytest

from quire.api.server.anthropic.errors import AnthropicError
from quire.api.server.app import errors_of, policy_of
from quire.api.server.errors import ErrorBody, ErrorDetail, Problem
from quire.api.server.guard import Guard
from quire.config.server import ServerConfig
from quire.errors import EngineError, OverloadedError
from tests.api.server.anthropic.test_messages import ADD, QUESTION, asked
from tests.api.server.test_guard import JSON, bearer, call

PATHS = ["/v1/messages", "/v1/messages/count_tokens"]


def checked(answer: httpx.Response) -> dict:
    """The error, in Anthropic's shape."""
    body = answer.json()
    assert list(body) == ["type", "error", "request_id"] and body["type"] == "error"
    assert list(body["error"]) == ["type", "message"] and body["request_id"] == answer.headers["request-id"]
    return body["error"]


def post(server, body, path: str = "/v1/messages", **options) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60, **options)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


def with_block(block: dict) -> list[dict]:
    return [{"role": "user", "content": [block]}]


def with_result(block: dict) -> list[dict]:
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    return [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


# name -> (fields that are wrong, what the message says)
WRONG = {
    "an image": ({"messages": with_block(IMAGE)}, "'image'"),
    "a document": ({"messages": with_block(DOCUMENT)}, "'document'"),
    "an image that a tool returned": ({"messages": with_result(IMAGE)}, "'image'"),
    "a search result": ({"messages": with_block({"type": "search_result"})}, "'search_result'"),
    "a server's call": ({"messages": with_block({"type": "server_tool_use", "id": "1"})}, "'server_tool_use'"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    "Anthropic's own tool": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    "a server of tools": ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    "an image as system text": ({"system": [IMAGE]}, "'image'"),
    "a block without a type": ({"messages": with_block({"text": "x"})}, "type is missing"),
    "no messages": ({"messages": []}, "at least one message"),
    "another role": ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
    "max_tokens of 0": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "a temperature below 0": ({"temperature": -1}, "temperature"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences"),
    "too many stop sequences": ({"stop_sequences": [str(idx) for idx in range(5000)]}, "stop_sequences"),
    "a name of no tool": ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    "two tools of one name": ({"tools": [ADD, ADD]}, "same name"),
    "a schema that is none": ({"output_config": {"format": {"schema": {"type": "nothing"}}}}, "'nothing'"),
    "a schema of deep nesting": (
        {"output_config": {"format": {"schema": json.loads('{"not":' * 60 + "{}" + "}" * 60)}}},
        "",
    ),
    "a lone surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    "arguments of a template that are reserved": ({"chat_template_kwargs": {"messages": []}}, "reserved"),
    "a template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
    "many tools": ({"tools": [{**ADD, "name": f"t{idx}"} for idx in range(600)]}, "tools must have at most 512"),
    "a long name": ({"model": "x" * 2000}, "model"),
    "a long salt": ({"cache_salt": "x" * 5000}, "cache_salt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_body_is_said_in_one_sentence(server, name):
    fields, says = WRONG[name]
    body = json.dumps(asked("Five.", **fields))
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/messages", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
    error = checked(answer)
    assert error["type"] == "invalid_request_error" and says in error["message"]
    assert "Traceback" not in error["message"] and "0x" not in error["message"]


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(server, client):
    body = asked("Five.", messages=[{"role": "user", "content": "word " * 4500}])
    num_tokens = client.messages.count_tokens(
        model="smol", system=body["system"], messages=body["messages"]
    ).input_tokens
    answer = post(server, body)
    assert answer.status_code == 400
    assert checked(answer)["message"] == f"prompt is too long: {num_tokens} tokens > 4095 maximum"
    for messages in (body["messages"], [{"role": "user", "content": "word " * 200_000}]):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
            client.messages.create(**{**body, "messages": messages}, stream=True)


def test_a_client_that_wants_the_server_to_keep_the_conversation_is_told_to_send_it(server):
    answer = post(server, asked("Five.", thread={"type": "continue", "previous_message_id": "msg_1"}))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["details"] == {"error_code": "thread_unsupported_request"}
    assert "send all messages" in error["message"]


def test_a_model_that_is_not_served(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**asked("Five."), "model": "claude-opus-4"})
    assert caught.value.type == "not_found_error" and caught.value.request_id == caught.value.body["request_id"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/batches"])
def test_other_methods_and_paths_below_have_the_shape_too(server, path):
    answer = httpx.get(server.url + path)
    assert answer.status_code == (404 if path.endswith("batches") else 405)
    assert checked(answer)["type"] == ("not_found_error" if path.endswith("batches") else "invalid_request_error")


def test_a_body_that_is_no_json(server):
    headers = {"content-type": "application/json"}
    for content in (b"{", b"[]", b'"x"', b"{\xff}"):
        answer = httpx.post(server.url + "/v1/messages", content=content, headers=headers)
        assert answer.status_code == 400 and checked(answer)["type"] == "invalid_request_error"
    answer = httpx.post(server.url + "/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and checked(answer)["type"] == "invalid_request_error"


# -- the guard ---------------------------------------------------------------------------------------------------------


async def never(scope, receive, send):
    raise AssertionError("the guard should have refused this")


async def fails(scope, receive, send):
    raise KeyError("/secret/path")


def guarded(path: str, headers=(), body=b"{}", app=never, **options):
    guard = Guard(app, policy_of, ServerConfig(**options), errors_of=errors_of)
    reply = call("POST", path, [*headers], body, guard=guard)
    error = json.loads(reply.body)
    assert error["type"] == "error" and error["request_id"] == reply.headers["request-id"]
    return reply.status, error["error"]["type"]


@pytest.mark.parametrize("path", PATHS)
def test_what_the_guard_refuses_has_the_shape(path):
    keys = {"api_key": ["k1"]}
    assert guarded(path, [JSON], **keys) == (401, "authentication_error")
    assert guarded(path, bearer("k2"), **keys) == (401, "authentication_error")
    assert guarded(path, [JSON, ("x-api-key", "k2")], **keys) == (401, "authentication_error")
    assert guarded(path, [JSON], b"x" * 200, max_body_bytes=100) == (413, "request_too_large")
    assert guarded(path, [JSON], b"[" * 200 + b"]" * 200) == (400, "invalid_request_error")
    assert guarded(path, [JSON, ("x-api-key", "a"), ("x-api-key", "b")]) == (400, "invalid_request_error")
    assert guarded(path, [JSON], max_held_bytes=1) == (503, "overloaded_error")
    assert guarded(path, [JSON], app=fails) == (500, "api_error")


def test_a_key_with_a_limit(tmp_path):
    file = tmp_path / "keys"
    file.write_text("k1 rpm=1\n")
    calls = []

    async def answers(scope, receive, send):
        calls.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    guard = Guard(answers, policy_of, ServerConfig(api_key_file=str(file)), errors_of=errors_of)
    headers = [JSON, ("x-api-key", "k1")]
    assert call("POST", "/v1/messages", headers, b"{}", guard=guard).status == 200
    reply = call("POST", "/v1/messages", headers, b"{}", guard=guard)
    assert reply.status == 429 and json.loads(reply.body)["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) > 0 and len(calls) == 1


def test_other_paths_keep_openais_shape():
    assert errors_of("/v1/chat/completions") is errors_of("/v1/messages_of_old") is errors_of("/") is ErrorBody
    assert errors_of("/v1/messages") is errors_of("/v1/messages/count_tokens/x") is AnthropicError


# -- trying again ------------------------------------------------------------------------------------------------------


def test_the_client_tries_again_when_the_server_is_full(server, monkeypatch):
    """Twice refused with 503, then answered."""
    submit, refusals = server.llm.submit, iter([OverloadedError("full", 0.1), OverloadedError("full", 0.1)])

    async def full(*args, **options):
        for refusal in refusals:
            raise refusal
        return await submit(*args, **options)

    monkeypatch.setattr(server.llm, "submit", full)
    client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=2, timeout=60)
    assert client.messages.create(**asked("Five.")).content[0].text == "Five."
    refusals = iter([OverloadedError("full", 7)])
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.with_options(max_retries=0).messages.create(**asked("Five."))
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
    assert caught.value.response.headers["retry-after"] == "7"


def test_a_stream_that_breaks_ends_with_an_error(server, client):
    said = []
    with pytest.raises(anthropic.APIStatusError, match="the engine is gone") as caught:
        with client.messages.stream(**asked("word " * 500, max_tokens=1000)) as stream:
            for text in stream.text_stream:
                said.append(text)
                if len(said) == 2:
                    (live,) = server.llm.cores.live.values()
                    server.loop.call_soon_threadsafe(live.fail, EngineError("the engine is gone"))
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(5)
    assert caught.value.body["error"]["type"] == "overloaded_error" and len(said) >= 2


def test_types_follow_the_status():
    problems = [Problem(status, ErrorDetail("it is so", "server_error")) for status in (400, 408, 415, 500, 503)]
    kinds = [AnthropicError.of(problem, "1").error.type for problem in problems]
    wrong = "invalid_request_error"
    assert kinds == [wrong, "timeout_error", wrong, "api_error", "overloaded_error"]
