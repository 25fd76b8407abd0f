"""/api/chat and /api/generate through the real `ollama` client: whole, as lines, with tools, thinking and formats."""

import asyncio
import json
import re
from datetime import datetime

import httpx
import ollama
import pydantic
import pytest

from tests.api.server.ollama.conftest import KEY
from tests.scripted import script

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 8}
THINKING = "<think>\nHm, two calls.\n</think>\n\nI look it up."
CALLS = "".join(
    f"\n<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': 2, 'b': second}})}\n</tool_call>"
    for second in (3, 4)
)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def told(*answers: str) -> list[dict]:
    """A conversation whose next answers are these."""
    return [{"role": "system", "content": script(*answers)}, {"role": "user", "content": "Go on."}]


def put_together(parts) -> tuple[str, str, list]:
    """Content, thinking and calls of a streamed chat."""
    parts = list(parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    calls = [call for part in parts for call in part.message.tool_calls or []]
    content, thinking = (
        "".join(getattr(part.message, name) or "" for part in parts) for name in ("content", "thinking")
    )
    return content, thinking, [(call.function.name, call.function.arguments) for call in calls]


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_chat_has_an_answer_with_counts_and_times(plain):
    answer = plain.chat("smol", ASK, options=GREEDY)
    assert answer.message.role == "assistant" and "Paris" in answer.message.content
    assert (answer.model, answer.done, answer.done_reason) == ("smol", True, "stop")
    assert answer.prompt_eval_count > 20 and answer.eval_count == 8
    assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration + answer.eval_duration > 10**6
    assert abs(datetime.fromisoformat(answer.created_at).timestamp() - datetime.now().timestamp()) < 60
    assert answer.message.tool_calls is None and answer.message.thinking is None


def test_a_streamed_chat_is_the_same_text_in_lines(plain, smol):
    whole = plain.chat("smol", ASK, options=GREEDY)
    parts = list(plain.chat("smol", ASK, options=GREEDY, stream=True))
    assert put_together(parts)[0] == whole.message.content and len(parts) > 4
    assert parts[0].done_reason is None and parts[0].eval_count is None
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 8)
    body = {"model": "smol", "messages": ASK, "options": GREEDY}
    with httpx.stream("POST", smol.url + "/api/chat", json=body) as answer:  # without stream: it is streamed
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines) == whole.message.content
    assert set(lines[0]) == {"model", "created_at", "message", "done"}


def test_async_clients_work_too(plain, smol):
    async def both() -> tuple[str, str]:
        client = ollama.AsyncClient(smol.url)
        whole = await client.chat("smol", ASK, options=GREEDY)
        parts = [part async for part in await client.generate("smol", "Hello", options=GREEDY, stream=True)]
        return whole.message.content, "".join(part.response for part in parts)

    chat, generated = asyncio.run(both())
    assert chat == plain.chat("smol", ASK, options=GREEDY).message.content
    assert generated == plain.generate("smol", "Hello", options=GREEDY).response


def test_a_prompt_is_put_into_the_template_with_its_system_text(plain):
    answer = plain.generate("smol", "What is the capital of France?", system="Be brief.", options=GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    assert answer.response == plain.chat("smol", messages, options=GREEDY).message.content
    assert answer.done and answer.eval_count == 8 and answer.context is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_prompt_is_continued_as_it_is(plain, client, stream):
    prompt = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    answer = plain.generate("smol", prompt, raw=True, options=GREEDY, stream=stream)
    text = "".join(part.response for part in answer) if stream else answer.response
    options = {"model": "smol", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    assert text == client.completions.create(**options).choices[0].text


def test_a_conversation_may_end_with_the_beginning_of_the_answer(plain):
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is the city of"}]
    assert plain.chat("smol", begun, options=GREEDY).message.content.startswith(" Paris")


def test_options_are_those_of_the_other_protocols(plain, client):
    options = {"temperature": 1.3, "top_p": 0.8, "top_k": 7, "min_p": 0.02, "seed": 11, "num_predict": 12}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    answer = plain.chat("smol", ASK, options={**options, **penalties, "repeat_penalty": 1.2, "num_thread": 3})
    extra = {"top_k": 7, "min_p": 0.02, "repetition_penalty": 1.2, "max_tokens": 12}
    known = {"temperature": 1.3, "top_p": 0.8, "seed": 11, **penalties}
    other = client.chat.completions.create(model="smol", messages=ASK, **known, extra_body=extra)
    assert answer.message.content == other.choices[0].message.content


def test_an_answer_ends_at_a_stop_text_or_its_length(plain):
    whole = plain.chat("smol", ASK, options={"temperature": 0, "num_predict": 3})
    assert (whole.done_reason, whole.eval_count) == ("length", 3)
    for stop in ("capital", ["nowhere", "capital"]):
        answer = plain.chat("smol", ASK, options={"temperature": 0, "stop": stop})
        assert answer.done_reason == "stop" and answer.message.content == "The "


def test_the_seed_minus_one_is_another_one_every_time(plain):
    options = {"temperature": 2, "seed": -1, "num_predict": 12}
    assert len({plain.chat("smol", ASK, options=options).message.content for _ in range(3)}) > 1


def test_an_answer_longer_than_the_context_is_cut(plain):
    asked = plain.generate("smol", "one, two, three, " * 80, raw=True, options={"num_predict": 4000, "temperature": 0})
    assert asked.done_reason == "length" and asked.prompt_eval_count + asked.eval_count <= 512
    chat = plain.chat("smol", [{"role": "user", "content": "one, two, " * 100}], options={"num_predict": 100_000})
    assert chat.prompt_eval_count + chat.eval_count <= 512


def test_logprobs_come_with_the_text(plain):
    whole = plain.chat("smol", ASK, options=GREEDY, logprobs=True, top_logprobs=2)
    parts = plain.chat("smol", ASK, options=GREEDY, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for part in parts for entry in part.logprobs or []]
    assert "".join(entry.token for entry in whole.logprobs) == whole.message.content + "<|im_end|>"
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in streamed)
    raw = plain.generate("smol", "Hello", raw=True, options=GREEDY, logprobs=True)
    assert "".join(entry.token for entry in raw.logprobs) == raw.response


def test_nothing_to_answer_only_asks_whether_the_model_is_there(plain):
    for answer in (plain.chat("smol"), plain.generate("smol"), plain.generate("smol", keep_alive=0)):
        assert (answer.done, answer.done_reason, answer.eval_count) == (True, "load", None)
    assert plain.chat("smol", []).message.content == ""


@pytest.mark.parametrize("name", ["smol", "smol:latest", "smol-alias:latest"])
def test_names_may_have_a_tag(plain, name):
    assert plain.chat(name, ASK, options=GREEDY, keep_alive="5m").model == name


# -- formats -----------------------------------------------------------------------------------------------------------


class Country(pydantic.BaseModel):
    capital: str = pydantic.Field(max_length=20)
    size: int = pydantic.Field(ge=1, le=9)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed(plain, stream):
    schema = Country.model_json_schema()
    answer = plain.chat("smol", ASK, format=schema, options={"seed": 1, "num_predict": 60}, stream=stream)
    assert Country.model_validate_json(put_together(answer)[0] if stream else answer.message.content)
    raw = plain.generate("smol", "JSON:", raw=True, format=schema, options={"seed": 1, "num_predict": 60})
    assert Country.model_validate_json(raw.response)


def test_json_is_any_object(plain):
    answer = plain.generate("smol", "A person in JSON.", format="json", options={"seed": 1, "num_predict": 40})
    assert answer.response.lstrip().startswith("{")
    assert plain.generate("smol", "Hello", format="", options=GREEDY).response


# -- thinking and tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_told_from_the_answer(thinker, stream):
    for think in (None, True):
        answer = thinker.chat("smol", told(THINKING), think=think, stream=stream)
        if stream:
            content, thinking, _ = put_together(answer)
        else:
            content, thinking = answer.message.content, answer.message.thinking
        assert (content.strip(), thinking.strip()) == ("I look it up.", "Hm, two calls.")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_can_be_turned_off(thinker, stream):
    """The template then closes the thinking itself; what a model thinks all the same is left out."""
    for answer in ("I look it up.", THINKING):
        options = {"system": script(answer), "think": False, "options": {"num_predict": 50}}
        found = thinker.generate("smol", "Go on.", **options, stream=stream)
        parts = list(found) if stream else [found]
        assert not any(part.thinking for part in parts)
        assert "I look it up." in "".join(part.response for part in parts)


def test_generate_tells_thinking_apart_too(thinker):
    answer = thinker.generate("smol", "Go on.", system=script(THINKING), think=True)
    assert (answer.response.strip(), answer.thinking.strip()) == ("I look it up.", "Hm, two calls.")


def test_a_level_of_thinking_reaches_the_template(thinker):
    assert thinker.chat("smol", told(THINKING), think="low").message.thinking


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_their_arguments_as_objects(thinker, stream):
    answer = thinker.chat("smol", told(THINKING + CALLS), tools=[add], stream=stream)
    if stream:
        content, thinking, calls = put_together(answer)
    else:
        content, thinking = answer.message.content, answer.message.thinking
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
        assert answer.done_reason == "stop"
    assert calls == [("add", {"a": 2, "b": 3}), ("add", {"a": 2, "b": 4})]
    assert (content.strip(), thinking.strip()) == ("I look it up.", "Hm, two calls.")


def test_a_call_that_was_cut_off_is_left_out(thinker):
    options = {"num_predict": 40}
    cut = thinker.chat("smol", told("I add." + CALLS), tools=[add], options=options)
    parts = list(thinker.chat("smol", told("I add." + CALLS), tools=[add], options=options, stream=True))
    assert cut.done_reason == parts[-1].done_reason == "length"
    calls = [(call.function.name, call.function.arguments) for call in cut.message.tool_calls or []]
    assert put_together(parts)[2] == calls and len(calls) < 2


def test_a_loop_of_three_turns_ends_with_the_answer(thinker):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %s, "b": %s}}\n</tool_call>'
    messages = told(call % (2, 3), call % (5, 8), "It is {last}.")
    while calls := (answer := thinker.chat("smol", messages, tools=[add])).message.tool_calls:
        messages.append(answer.message)
        messages += [
            {"role": "tool", "content": str(add(**each.function.arguments)), "tool_name": "add"} for each in calls
        ]
    assert answer.message.content == "It is 13." and len(messages) == 6


def test_a_schema_and_thinking_go_together(thinker):
    answer = thinker.chat("smol", told('<think>\nHm.\n</think>\n\n{"capital":"Paris","size":3}'), think=True)
    assert json.loads(answer.message.content) == {"capital": "Paris", "size": 3}


# -- errors ------------------------------------------------------------------------------------------------------------

REFUSED = [
    ("/api/chat", {"messages": ASK, "template": "{{ x }}"}, "template"),
    ("/api/chat", {"messages": [{**ASK[0], "images": ["aGk="]}]}, "images"),
    ("/api/chat", {"messages": ASK, "options": {"num_ctx": 100_000}}, "num_ctx is 100000.*512"),
    ("/api/chat", {"messages": ASK, "options": {"mirostat": 2}}, "mirostat"),
    ("/api/chat", {"messages": ASK, "options": {"typical_p": 0.5}}, "typical_p"),
    ("/api/chat", {"messages": ASK, "options": {"temperature": -1}}, "temperature"),
    ("/api/chat", {"messages": ASK, "options": {"temperature": "hot"}}, "temperature"),
    ("/api/chat", {"messages": ASK, "options": {"stop": ["x"] * 99}}, "stop"),
    ("/api/chat", {"messages": ASK, "options": {"num_predict": 2**70}}, "num_predict"),
    ("/api/chat", {"messages": ASK, "options": []}, "options"),
    ("/api/chat", {"messages": ASK, "format": "xml"}, "format"),
    ("/api/chat", {"messages": ASK, "format": {"type": "strin"}}, "strin"),
    ("/api/chat", {"messages": ASK, "think": True}, "does not think"),
    ("/api/chat", {"messages": ASK, "think": "much"}, "think"),
    ("/api/chat", {"messages": ASK, "top_logprobs": 2}, "top_logprobs"),
    ("/api/chat", {"messages": ASK, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("/api/chat", {"messages": [{"content": "a"}]}, "role"),
    ("/api/chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "content"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a " * 3000}]}, "tokens"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images"),
    ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ("/api/generate", {"prompt": "a", "raw": True, "think": True}, "think"),
    ("/api/generate", {"prompt": "a " * 3000, "raw": True}, "tokens"),
    ("/api/generate", {"prompt": 7}, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(smol, path, body, says, stream):
    answer = httpx.post(smol.url + path, json={"model": "smol", "stream": stream, **body})
    assert answer.status_code == 400 and set(answer.json()) == {"error"}
    assert re.search(says, answer.json()["error"]), answer.text


def test_errors_have_a_status_and_a_sentence(plain, scripted):
    with pytest.raises(ollama.ResponseError, match="nobody.*not found") as unknown:
        plain.chat("nobody", ASK)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not found") as unknown:
        list(plain.chat("nobody:latest", ASK, stream=True))
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="key is needed") as locked:
        ollama.Client(scripted.url).chat("smol", ASK)
    assert locked.value.status_code == 401
    with pytest.raises(ollama.ResponseError, match="no such path") as missing:
        plain.pull("llama3")
    assert missing.value.status_code == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 7}', b'{"messages": ' + b"[" * 5000])
def test_what_is_no_body_is_refused_in_ollamas_shape(smol, body):
    answer = httpx.post(smol.url + "/api/chat", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 413, 415) and isinstance(answer.json()["error"], str)


def test_every_path_wants_the_users_key(scripted):
    for method, path in [
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("GET", "/api/tags"),
        ("POST", "/api/show"),
        ("GET", "/api/version"),
        ("POST", "/api/nothing"),
    ]:
        answer = httpx.request(method, scripted.url + path, headers={"authorization": f"Bearer {KEY}x"})
        assert answer.status_code == 401 and isinstance(answer.json()["error"], str), path


def test_a_reader_who_leaves_ends_the_answer(thinker, scripted):
    lines = thinker.chat("smol", told("word " * 300), stream=True)
    assert next(lines).done is False
    lines.close()  # the fixture sees that the engine is idle
