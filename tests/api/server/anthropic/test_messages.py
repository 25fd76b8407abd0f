"""/v1/messages with the real `anthropic` client: a scripted model says what each test wants to be said."""

import asyncio
import json
import logging

import anthropic
import httpx
import pydantic
import pytest

from tests.scripted import script

ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
THOUGHT = "<think>\nI must add.\n</think>\n\n"
QUESTION = [{"role": "user", "content": "What is two plus three?"}]


def asked(*answers: str, **fields) -> dict:
    """A request to which the model says these answers, one per turn."""
    return {"model": "smol", "max_tokens": 200, "system": script(*answers), "messages": QUESTION, **fields}


def events_of(server, body: dict) -> list[tuple[str, dict]]:
    answer = httpx.post(server.url + "/v1/messages", json={**body, "stream": True}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def shown(message) -> list:
    found = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(block.text)
            case "thinking":
                assert block.signature
                found.append(("thinking", block.thinking))
            case "tool_use":
                assert block.id.startswith("toolu_")
                found.append((block.name, block.input))
    return found


# name -> (what the model says, what is asked for, what the answer holds, why it ended)
ANSWERS = {
    "text": (["It is five."], {}, ["It is five."], "end_turn"),
    "thinking": ([THOUGHT + "Five."], {}, [("thinking", "I must add."), "Five."], "end_turn"),
    "thinking, not shown": (
        [THOUGHT + "Five."],
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        [("thinking", ""), "Five."],
        "end_turn",
    ),
    "a call": ([CALL], {"tools": [ADD]}, [("add", {"a": 2, "b": 3})], "tool_use"),
    "thinking, text and two calls": (
        [f"{THOUGHT}I add.\n{CALL}\n{CALL}"],
        {"tools": [ADD]},
        [("thinking", "I must add."), "I add.", ("add", {"a": 2, "b": 3}), ("add", {"a": 2, "b": 3})],
        "tool_use",
    ),
    "a named call": (
        [CALL],
        {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}, "thinking": {"type": "disabled"}},
        [("add", {"a": 2, "b": 3})],
        "tool_use",
    ),
    "a stop sequence": (["It is five. Really."], {"stop_sequences": [" five"]}, ["It is"], "stop_sequence"),
    "cut": (["one two three four five six"], {"max_tokens": 3}, ["one two three"], "max_tokens"),
    "nothing": ([""], {}, [""], "end_turn"),
    "letters of several bytes": (["Zürich, 東京, 🙂"], {}, ["Zürich, 東京, 🙂"], "end_turn"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_whole_and_streamed(client, name):
    says, fields, wanted, stop_reason = ANSWERS[name]
    body = asked(*says, **fields)
    message = client.messages.create(**body)
    assert (shown(message), message.stop_reason) == (wanted, stop_reason)
    assert message.id.startswith("msg_") and (message.type, message.role, message.model) == (
        "message",
        "assistant",
        "smol",
    )
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert (shown(streamed), streamed.stop_reason) == (wanted, stop_reason)
    assert streamed.stop_sequence == message.stop_sequence == (" five" if stop_reason == "stop_sequence" else None)
    assert streamed.usage.output_tokens == message.usage.output_tokens > 0


def test_a_streams_events_come_in_their_order(server):
    events = events_of(server, asked(f"{THOUGHT}I add.\n{CALL}", tools=[ADD]))
    names = [name for name, _ in events]
    once = [name for idx, name in enumerate(names) if idx == 0 or name != names[idx - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    first = ["content_block_start", "ping", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *first, *block, *block, "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    opened = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert opened[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert opened[1] == {"type": "text", "text": ""}
    assert {**opened[2], "id": ""} == {"type": "tool_use", "id": "", "name": "add", "input": {}}
    deltas = [(data["index"], data["delta"]["type"]) for name, data in events if name == "content_block_delta"]
    kinds = ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert list(dict.fromkeys(deltas)) == list(zip([0, 0, 1, 2], kinds))
    assert deltas.count((0, "signature_delta")) == 1
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > start["usage"]["output_tokens"]
    assert last["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_text_arrives_as_it_is_generated(client):
    with client.messages.stream(**asked("one two three four five six seven eight")) as stream:
        texts = list(stream.text_stream)
    assert "".join(texts) == "one two three four five six seven eight" and len(texts) >= 2


def test_the_asynchronous_client(server):
    async def ask() -> tuple:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as client:
            whole = await client.messages.create(**asked("It is five."))
            async with client.messages.stream(**asked("It is five.")) as stream:
                texts = [text async for text in stream.text_stream]
            raw = [event.type async for event in await client.messages.create(**asked("Five."), stream=True)]
            return shown(whole), "".join(texts), raw[0], raw[-1]

    assert asyncio.run(ask()) == (["It is five."], "It is five.", "message_start", "message_stop")


def test_a_message_of_the_beta_client(client):
    message = client.beta.messages.create(**asked("Five."), betas=["context-management-2025-06-27"])
    assert shown(message) == ["Five."]


def test_plain_http(server):
    headers = {"x-api-key": "any", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    answer = httpx.post(server.url + "/v1/messages?beta=true", json=asked("Five."), headers=headers)
    body = answer.json()
    assert body["content"] == [{"type": "text", "text": "Five."}] and body["stop_sequence"] is None
    assert answer.headers["request-id"] == answer.headers["x-request-id"] and body["id"].endswith(
        answer.headers["request-id"]
    )


def test_tokens_that_were_cached_are_counted_apart(client):
    body = asked("Five.", messages=[{"role": "user", "content": "A question of its own. " * 30}])
    first, second = client.messages.create(**body).usage, client.messages.create(**body).usage
    total = client.messages.count_tokens(model="smol", system=body["system"], messages=body["messages"]).input_tokens
    assert first.cache_read_input_tokens % 16 == second.cache_read_input_tokens % 16 == 0
    assert second.cache_read_input_tokens > max(64, first.cache_read_input_tokens)
    for usage in (first, second):
        assert usage.input_tokens + usage.cache_read_input_tokens == total and usage.cache_creation_input_tokens == 0
    with client.messages.stream(**body) as stream:
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (second.input_tokens, second.cache_read_input_tokens)


def test_counting_counts_what_would_be_sent(client, server):
    thinking_off = {"thinking": {"type": "disabled"}}
    for fields in ({}, {"tools": [ADD]}, thinking_off, {"tools": [ADD], "tool_choice": {"type": "none"}}):
        body = asked("Five.", **fields)
        usage = client.messages.create(**body).usage
        body.pop("max_tokens")
        assert client.messages.count_tokens(**body).input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_conversation_longer_than_the_context_can_be_counted(client):
    messages = [{"role": "user", "content": "word " * 5000}]
    assert client.messages.count_tokens(model="smol", messages=messages).input_tokens > 5000


def test_an_answer_goes_on_where_the_final_message_ends(client):
    begun = [*QUESTION, {"role": "assistant", "content": "It is ("}]
    assert shown(client.messages.create(**asked("five)", messages=begun))) == ["five)"]


def test_max_tokens_beyond_the_context_are_cut(client, server):
    say = "word " * 4096
    for stream in (False, True):
        body = asked("word", max_tokens=32_000, stop_sequences=["nothing like it"])
        assert client.messages.create(**body).stop_reason == "end_turn"
        body = {**body, "system": script(say[:7000]), "messages": [{"role": "user", "content": "word " * 1400}]}
        if stream:
            with client.messages.stream(**body) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**body)
        assert message.stop_reason == "model_context_window_exceeded"
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == 4096


def test_without_parallel_calls_the_first_ends_the_answer(client):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(**asked(CALL, tools=[ADD], tool_choice=choice))
    assert shown(message) == [("add", {"a": 2, "b": 3})] and message.stop_reason == "tool_use"


def test_none_means_that_calls_are_only_text(client):
    message = client.messages.create(**asked(CALL, tools=[ADD], tool_choice={"type": "none"}))
    assert shown(message) == [CALL] and message.stop_reason == "end_turn"


class Sum(pydantic.BaseModel):
    total: int


def test_an_answer_of_a_format_is_parsed_by_the_client(client):
    parsed = client.messages.parse(**asked('{"total": 5}'), output_format=Sum)
    assert parsed.parsed_output == Sum(total=5)


def test_thinking_and_results_that_are_sent_back_reach_the_model(client):
    said = client.messages.create(**asked(THOUGHT + CALL, tools=[ADD]))
    call = said.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "seven", "is_error": True}
    messages = [*QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**asked(THOUGHT + CALL, "It said {last}.", messages=messages, tools=[ADD]))
    assert shown(answer) == ["It said Error: seven."]
    without = [{"role": "assistant", "content": [call]} if turn["role"] == "assistant" else turn for turn in messages]
    count = lambda turns: client.messages.count_tokens(model="smol", messages=turns, tools=[ADD]).input_tokens  # noqa: E731
    assert count(messages) > count(without)


def test_unknown_fields_are_ignored_and_logged_once(server, caplog):
    fields = {"metadata": {"user_id": "me"}, "context_management": {"edits": []}, "a_field_of_tomorrow": 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = httpx.post(server.url + "/v1/messages", json=asked("Five.", **fields))
            assert answer.status_code == 200
    lines = [record.getMessage() for record in caplog.records if "a_field_of_tomorrow" in record.getMessage()]
    assert len(lines) == 1


def test_a_client_that_leaves_frees_the_model(client, server):
    with client.messages.stream(**asked("word " * 1000, max_tokens=1500)) as stream:
        for _ in zip(range(3), stream.text_stream):
            pass
    # The fixture waits until the engine is idle.
