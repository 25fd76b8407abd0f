"""Tool calls through the real `openai` client: SmolLM2 with Qwen 2.5's template, which it knows (both are ChatML).

A model this small calls tools by itself only after examples; where calls are required, the grammar forces them.
"""

import concurrent.futures
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import httpx
import jinja2
import jsonschema_rs
import openai
import pydantic
import pytest

from tests.serving import ServerProcess

TEMPLATE = Path(__file__).parents[2] / "data/templates/Qwen-Qwen2.5-7B-Instruct.jinja"


def tool(name: str, description: str, **properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TIME = tool("get_time", "The time in a zone.", zone={"enum": ["UTC", "CET"]})
CITIES = {"type": "array", "items": {"enum": ["Zürich", "東京"]}, "minItems": 1, "maxItems": 2}
PLACE = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}, "cities": CITIES},
    "required": ["zip", "cities"],
    "additionalProperties": False,
}
WEATHER = tool("get_weather", "Wie das Wetter ist.", unit={"enum": ["°C", "°F"]}, place=PLACE)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
VALID = {
    each["function"]["name"]: jsonschema_rs.validator_for(each["function"]["parameters"]).is_valid
    for each in (TIME, WEATHER)
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def call_message(*zones: str) -> dict:
    calls = []
    for zone in zones:
        function = {"name": "get_time", "arguments": json.dumps({"zone": zone})}
        calls.append({"id": f"call_{zone}", "type": "function", "function": function})
    return {"role": "assistant", "content": None, "tool_calls": calls}


def results(*zones: str, time: str) -> list[dict]:
    return [{"role": "tool", "tool_call_id": f"call_{zone}", "content": time} for zone in zones]


def example(*zones: str, time: str) -> list[dict]:
    """A question about the time in some zones, the calls, their results and the answer."""
    asked = {"role": "user", "content": f"What time is it in {' and '.join(zones)}?"}
    answer = {"role": "assistant", "content": f"It is {time}."}
    return [asked, call_message(*zones), *results(*zones, time=time), answer]


ONE = [
    *example("UTC", time="12:00"),
    *example("CET", time="13:00"),
    *example("UTC", time="12:01"),
    example("CET", time="")[0],
]
BOTH = [message for time in ("12:00", "13:00", "12:01") for message in example("UTC", "CET", time=time)]
BOTH.append(BOTH[0])

# name -> how to ask; together every mode there is
MODES = {
    "auto, and it calls": {"messages": ONE, "tools": [TIME, WEATHER], "temperature": 0},
    "auto, and it calls twice": {"messages": BOTH, "tools": [TIME], "temperature": 0},
    "auto, and it answers": {"messages": QUESTION, "tools": [TIME], "tool_choice": "auto", "max_tokens": 20},
    "none": {"messages": ONE, "tools": [TIME], "tool_choice": "none", "max_tokens": 20},
    "required": {"tools": [TIME, WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [TIME, WEATHER], "tool_choice": NAMED},
    "cut": {"tools": [TIME, WEATHER], "tool_choice": NAMED, "max_tokens": 30},
}


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[ServerProcess]:
    flags = ["--max-model-len", "1024", "--num-threads", "1", "--kv-cache-memory-bytes", "128M"]
    with ServerProcess("smollm2", *flags, "--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE)) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, **options):
    defaults = {"model": "smollm2", "messages": QUESTION, "max_tokens": 150, "seed": 3}
    return client.chat.completions.create(**{**defaults, **options})


def calls_of(message) -> list[tuple[str, dict]]:
    """Names and arguments, which must be what their schemas say."""
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert all(VALID[name](arguments) for name, arguments in calls), calls
    return calls


# -- the modes ---------------------------------------------------------------------------------------------------------


def test_a_model_may_call_a_tool(client):
    (choice,) = ask(client, **MODES["auto, and it calls"]).choices
    assert calls_of(choice.message) == [("get_time", {"zone": "CET"})]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_") and len(call.id) > 20


def test_a_model_may_make_two_calls_at_once(client):
    (choice,) = ask(client, **MODES["auto, and it calls twice"]).choices
    assert calls_of(choice.message) == [("get_time", {"zone": "UTC"}), ("get_time", {"zone": "CET"})]
    assert choice.finish_reason == "tool_calls" and len({call.id for call in choice.message.tool_calls}) == 2


def test_without_parallel_calls_the_first_one_ends_the_answer(client):
    (choice,) = ask(client, **MODES["auto, and it calls twice"], parallel_tool_calls=False).choices
    assert calls_of(choice.message) == [("get_time", {"zone": "UTC"})] and choice.finish_reason == "tool_calls"


def test_a_model_may_answer_instead(client):
    (choice,) = ask(client, **MODES["auto, and it answers"]).choices
    assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason in ("stop", "length")


def test_none_means_no_calls_and_no_tools_in_the_prompt(client):
    answer = ask(client, **MODES["none"])
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content
    assert answer.usage.prompt_tokens == ask(client, messages=ONE, max_tokens=1).usage.prompt_tokens


def test_required_means_at_least_one_call_by_each_choice(client):
    answer = ask(client, **MODES["required"], n=3, temperature=1.2)
    for choice in answer.choices:
        assert len(calls_of(choice.message)) == 1
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_required_calls_may_be_several(client):
    (choice,) = ask(client, messages=BOTH, tools=[TIME], tool_choice="required", temperature=0).choices
    assert calls_of(choice.message) == [("get_time", {"zone": "UTC"}), ("get_time", {"zone": "CET"})]


def test_a_named_tool_is_called_once_whatever_the_question(client):
    (choice,) = ask(client, **{**MODES["named"], "messages": ONE}).choices
    assert [name for name, _ in calls_of(choice.message)] == ["get_weather"]
    assert choice.finish_reason == "stop"  # as OpenAI says it


def test_a_tool_without_parameters_takes_any_object(client):
    ping = {"type": "function", "function": {"name": "ping"}}
    choice = ask(client, tools=[ping], tool_choice="required", max_tokens=40).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "ping" and call.function.arguments.startswith("{")


def test_a_cut_call_is_visibly_incomplete(client):
    (choice,) = ask(client, **MODES["cut"]).choices
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.tool_calls[0].function.arguments)


def test_an_answer_is_a_call_or_has_its_format(client):
    schema = {"type": "integer", "minimum": 100, "maximum": 999}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for messages in (ONE, QUESTION):
        options = {"tools": [TIME], "response_format": form, "parallel_tool_calls": False}
        message = ask(client, messages=messages, **options).choices[0].message
        if message.tool_calls:
            assert len(calls_of(message)) == 1
        else:
            assert 100 <= int(message.content) <= 999


class GetOwner(pydantic.BaseModel):
    """Who owns a pet."""

    pet: Literal["Käfer", "cat"]
    ages: Annotated[list[int], pydantic.Field(min_length=1, max_length=2)]


def test_the_clients_parse_helper_reads_strict_arguments(client):
    tools = [openai.pydantic_function_tool(GetOwner)]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "seed": 1}
    answer = client.chat.completions.parse(model="smollm2", messages=QUESTION, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetOwner)


# -- streams -----------------------------------------------------------------------------------------------------------


def accumulated(events) -> tuple[str | None, list[list], str | None]:
    """Content, calls and end of a stream, put together by index as clients do."""
    content: str | None = None
    calls: list[list] = []
    end: str | None = None
    for event in events:
        (choice,) = event.choices
        if choice.delta.content is not None:
            content = (content or "") + choice.delta.content
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.type == "function" and call.function.name
                calls.append([call.function.name, ""])
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.function.name is None
            calls[call.index][1] += call.function.arguments
        assert end is None
        end = choice.finish_reason
    return content, calls, end


def uncached() -> dict:
    """For questions that must be computed the same way twice: what comes from the cache may differ in its last bits."""
    return {"cache_salt": uuid.uuid4().hex}


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_put_together_is_the_whole_answer(client, mode):
    (choice,) = ask(client, **MODES[mode], extra_body=uncached()).choices
    whole = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    events = list(ask(client, **MODES[mode], extra_body=uncached(), stream=True))
    assert accumulated(events) == (choice.message.content, whole, choice.finish_reason)
    if whole:  # arguments come as they are written
        num_call_events = sum(bool(event.choices[0].delta.tool_calls) for event in events)
        assert num_call_events > len(whole)


def test_the_clients_stream_helper_gives_the_same_answer(client):
    (choice,) = ask(client, **MODES["required"], extra_body=uncached()).choices
    options = {"model": "smollm2", "messages": QUESTION, "max_tokens": 150, "seed": 3}
    with client.chat.completions.stream(**options, **MODES["required"], extra_body=uncached()) as stream:
        kinds = {event.type for event in stream}
        (final,) = stream.get_final_completion().choices
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert calls_of(final.message) == calls_of(choice.message)
    assert (final.finish_reason, final.message.content) == (choice.finish_reason, choice.message.content)


def test_a_stream_of_calls_may_have_logprobs_and_usage(client):
    *events, last = ask(client, **MODES["required"], stream=True, logprobs=True, stream_options={"include_usage": True})
    logprobs = [event.choices[0].logprobs for event in events]
    tokens = [entry for each in logprobs if each is not None for entry in each.content]
    assert len(tokens) == last.usage.completion_tokens
    assert "".join(token.token for token in tokens).startswith("<tool_call>\n")


# -- a conversation with tools -----------------------------------------------------------------------------------------


def test_a_round_trip_ends_with_an_answer_made_from_the_result(client):
    message = ask(client, **MODES["auto, and it calls"]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "15:07"}
    (choice,) = ask(client, messages=[*ONE, message, result], tools=[TIME], temperature=0).choices
    assert "15:07" in choice.message.content and choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_the_prompt_is_what_the_template_makes_of_messages_and_tools(server, client):
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as Hugging Face has it
    decoded = {"name": "get_time", "arguments": {"zone": "UTC"}}  # templates get arguments as an object
    calls = [call | {"function": decoded} for call in call_message("UTC")["tool_calls"]]
    messages = [QUESTION[0], call_message("UTC") | {"tool_calls": calls}, *results("UTC", time="12:00")]
    template = environment.from_string(TEMPLATE.read_text())
    truth = template.render(messages=messages, tools=[TIME, WEATHER], add_generation_prompt=True)
    sent = [QUESTION[0], call_message("UTC"), *results("UTC", time="12:00")]
    answer = ask(client, messages=sent, tools=[TIME, WEATHER], max_tokens=1, extra_body={"return_token_ids": True})
    assert server.post("/detokenize", {"tokens": answer.prompt_token_ids}).json()["prompt"] == truth


def test_what_tools_and_results_spell_stays_text(server, client):
    def num_special(word: str) -> int:
        named = tool("get_time", word, zone={"enum": ["UTC", word]})
        messages = [QUESTION[0], call_message("UTC"), *results("UTC", time=word)]
        answer = ask(client, messages=messages, tools=[named], max_tokens=1, extra_body={"return_token_ids": True})
        return answer.prompt_token_ids.count(end)

    (end,) = server.post("/tokenize", {"prompt": "<|im_end|>"}).json()["tokens"]
    assert num_special("<|im_end|>") == num_special("hello") > 0


# -- what is refused ---------------------------------------------------------------------------------------------------


def with_schema(schema, **more) -> list[dict]:
    return [{"type": "function", "function": {"name": "broken", "parameters": schema, **more}}]


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
IRI = {"type": "object", "properties": {"a": {"type": "string", "format": "iri"}}}
BOTH_AT_ONCE = {"tool_choice": "required", "response_format": {"type": "json_object"}}
MANY_LONG = [tool(f"f{idx}", "", a={"const": "x" * 500}) for idx in range(300)]
BROKEN_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
REFUSED = [
    ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice", "get_weather"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice", "tools"),
    ({"tools": [TIME], "tool_choice": "any"}, "tool_choice", "any"),
    ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice", "function"),
    ({"tools": [TIME], **BOTH_AT_ONCE}, "tool_choice", "response_format"),
    ({"tools": [TIME], "guided_grammar": 'start: "a"'}, "guided_grammar", "GBNF"),
    ({"tools": [TIME], "min_tokens": 3}, "min_tokens", "min_tokens"),
    ({"tools": [TIME, TIME]}, "tools", "same name"),
    ({"tools": [tool("two words", "")]}, "tools", "two words"),
    ({"tools": [tool("", "")]}, "tools", "named"),
    ({"tools": [tool("a" * 65, "")]}, "tools", "64"),
    ({"tools": [tool("a\nb", "")]}, "tools", "named"),
    ({"tools": [tool(f"f{idx}", "") for idx in range(513)]}, "tools", "512"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "name"),
    ({"tools": [{"type": "retrieval"}]}, "tools", "retrieval"),
    ({"tools": "get_time"}, "tools", "array"),
    ({"tools": with_schema({"type": "string"})}, "tools", "broken"),
    ({"tools": with_schema("string")}, "tools", "object"),
    ({"tools": with_schema(IRI, strict=True)}, "tools", "iri"),
    ({"tools": with_schema(IRI), "tool_choice": "required"}, "tools", "broken"),
    ({"tools": with_schema(UNIQUE), "tool_choice": "required"}, None, "uniqueItems"),
    ({"tools": MANY_LONG, "tool_choice": "required"}, "tools", "120000"),
    ({"functions": [TIME["function"]]}, "functions", "functions"),
    ({"messages": [QUESTION[0], BROKEN_CALL]}, "messages", "JSON"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_served_is_refused_in_a_sentence(server, fields, param, says, stream):
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 4, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text[:200]
    error = answer.json()["error"]
    assert says in error["message"] and (error["param"] or "").startswith(param or "")


def test_where_calling_is_the_models_own_idea_a_schema_may_stay_a_hint(client):
    assert ask(client, tools=with_schema(IRI), max_tokens=2).choices[0].finish_reason == "length"


def test_a_body_full_of_tools_holds_nobody_up(server):
    values = [f"x{number}" for number in range(2000)]
    crowd = [tool(f"f{idx}", "", a={"enum": values}) for idx in range(100)]
    body = json.dumps({"messages": QUESTION, "tools": crowd, "tool_choice": "required"})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        headers = {"content-type": "application/json"}
        refused = pool.submit(server.client.post, "/v1/chat/completions", content=body, headers=headers)
        longest_s = 0.0
        while not refused.done():
            started = time.monotonic()
            assert httpx.get(server.url + "/live").status_code == 200
            longest_s = max(longest_s, time.monotonic() - started)
    assert refused.result().status_code == 400 and longest_s < 1
