"""Answers that must have a shape, asked for in every way there is: the real `openai` client, `quire serve`, SmolLM2.

The judges are not ours: jsonschema_rs for schemas, `re` for patterns, pydantic for the client's own helper.
"""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Literal

import httpx
import jsonschema_rs
import openai
import pydantic
import pydantic_core
import pytest

from tests.serving import ServerProcess

ASK = [{"role": "user", "content": "Describe a person in JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "mood": {"enum": ["glücklich", "悲しい", "😀"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
        "home": {
            "type": "object",
            "properties": {"city": {"const": "Zürich"}, "zip": {"type": "string", "pattern": "^[1-9][0-9]{3}$"}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "mood", "tags", "home"],
    "additionalProperties": False,
}
IS_PERSON = jsonschema_rs.validator_for(PERSON).is_valid
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}


def in_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[ServerProcess]:
    flags = "--max-model-len 1024 --num-threads 1 --kv-cache-memory-bytes 128M"
    with ServerProcess("smollm2", *flags.split()) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, **options):
    defaults = {"model": "smollm2", "messages": ASK, "max_tokens": 150, "seed": 5}
    return client.chat.completions.create(**{**defaults, **options})


def read(answer) -> tuple[str, str]:
    """Text and end of a streamed answer."""
    events = [event.choices[0] for event in answer]
    assert all(event.finish_reason is None for event in events[:-1])
    return "".join(event.delta.content or "" for event in events), events[-1].finish_reason


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed(client, stream):
    answer = ask(client, response_format=in_format(PERSON), stream=stream)
    text, end = read(answer) if stream else (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert end == "stop" and IS_PERSON(json.loads(text)), text


def test_any_json_object_will_do(client, server):
    for choice in ask(client, response_format={"type": "json_object"}, n=2, max_tokens=60).choices:
        allow_partial = choice.finish_reason == "length" and "trailing-strings"
        assert isinstance(pydantic_core.from_json(choice.message.content, allow_partial=allow_partial), dict)
    (empty,) = server.post("/tokenize", {"prompt": "{}"}).json()["tokens"]
    (choice,) = ask(client, response_format={"type": "json_object"}, logit_bias={str(empty): 100}).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "{}")


def test_each_of_several_choices_follows_the_schema_and_has_its_logprobs(client):
    answer = ask(client, response_format=in_format(PERSON), n=2, logprobs=True, top_logprobs=2, temperature=1.2)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert all(IS_PERSON(json.loads(text)) for text in texts) and len(set(texts)) == 2
    entries = [choice.logprobs.content for choice in answer.choices]
    assert sum(map(len, entries)) == answer.usage.completion_tokens
    for text, tokens in zip(texts, entries):
        assert b"".join(bytes(token.bytes) for token in tokens).startswith(text.encode())
        assert all(token.logprob <= 0 and token.top_logprobs for token in tokens)


def test_several_choices_of_a_stream_follow_the_schema(client):
    texts = ["", ""]
    for event in ask(client, response_format=in_format(PERSON), n=2, logprobs=True, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(IS_PERSON(json.loads(text)) for text in texts)


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog", "Käfer"]
    age: Annotated[int, pydantic.Field(ge=0, le=30)]


class Owner(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=10)]
    pets: Annotated[list[Pet], pydantic.Field(min_length=1, max_length=2)]
    best: Pet | None


def test_the_clients_parse_helper_gives_a_pydantic_model(client):
    answer = client.chat.completions.parse(model="smollm2", messages=ASK, max_tokens=200, seed=2, response_format=Owner)
    owner = answer.choices[0].message.parsed
    assert isinstance(owner, Owner) and owner.pets[0].kind in ("cat", "dog", "Käfer")


def test_the_clients_stream_helper_parses_too(client):
    options = {"model": "smollm2", "messages": ASK, "max_tokens": 200, "seed": 2}
    with client.chat.completions.stream(**options, response_format=Owner) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Owner)
    assert {"content.delta", "content.done"} <= kinds


# -- the other shapes --------------------------------------------------------------------------------------------------

TAG = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": NUMBER}, "end": "</n>"}
TAGGED = {"type": "structural_tag", "format": TAG}
SHAPES = [
    ({"structured_outputs": {"json": NUMBER}}, "[1-9][0-9]"),
    ({"structured_outputs": {"json": json.dumps(NUMBER)}}, "[1-9][0-9]"),
    ({"structured_outputs": {"regex": "[A-ZÄ]{2}-[0-9]{3}"}}, "[A-ZÄ]{2}-[0-9]{3}"),
    ({"structured_outputs": {"choice": ["Grüße", "さようなら"]}}, "Grüße|さようなら"),
    ({"structured_outputs": {"grammar": 'root ::= pair "!"\npair ::= [0-9] "," [a-z]'}}, "[0-9],[a-z]!"),
    ({"structured_outputs": {"grammar": 'start: "x" NUM "y"\nNUM: /[0-9]{2}/'}}, "x[0-9]{2}y"),
    ({"structured_outputs": {"structural_tag": TAGGED}}, "<n>[1-9][0-9]</n>"),
    ({"response_format": TAGGED}, "<n>[1-9][0-9]</n>"),
    ({"response_format": in_format(NUMBER)}, "[1-9][0-9]"),
    ({"guided_json": NUMBER}, "[1-9][0-9]"),
    ({"guided_json": json.dumps(NUMBER)}, "[1-9][0-9]"),
    ({"guided_regex": "(ab|cd){3}"}, "(ab|cd){3}"),
    ({"guided_choice": ["red", "blue"]}, "red|blue"),
    ({"guided_grammar": 'root ::= "q" [0-9] "z"'}, "q[0-9]z"),
    ({"grammar": 'root ::= "\\x71" num # a number\nnum ::= [0-9]{2,3} | "x"'}, "q([0-9]{2,3}|x)"),
    ({"structured_outputs": {"gbnf": 'root ::= [a-c]{3} "\\x21"'}}, "[a-c]{3}!"),
    ({"json_schema": NUMBER, "grammar": ""}, "[1-9][0-9]"),
    ({"response_format": {"type": "json_object", "schema": NUMBER}}, "[1-9][0-9]"),
    ({"response_format": {"type": "json_schema", "schema": NUMBER}}, "[1-9][0-9]"),
    ({"response_format": {"type": "text"}, "guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
]


@pytest.mark.parametrize(("fields", "pattern"), SHAPES, ids=lambda value: str(value)[:50])
def test_every_way_to_ask_for_a_shape_works_in_both_protocols(client, fields, pattern):
    chat = ask(client, max_tokens=30, extra_body=fields).choices[0]
    text, end = read(ask(client, max_tokens=30, extra_body=fields, stream=True))
    prompts = ["It is", "We are"]
    plain = client.completions.create(model="smollm2", prompt=prompts, max_tokens=30, n=2, extra_body=fields)
    ends = [chat.finish_reason, end, *(choice.finish_reason for choice in plain.choices)]
    texts = [chat.message.content, text, *(choice.text for choice in plain.choices)]
    assert ends == ["stop"] * 6
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_character_may_come_byte_by_byte(client, server):
    first_byte = server.post("/tokenize", {"prompt": "\u0081"}).json()["tokens"][0]  # also that of the degree sign
    answer = ask(client, extra_body={"guided_choice": ["°C", "°F"]}, logit_bias={str(first_byte): 100})
    assert answer.choices[0].message.content in ("°C", "°F") and answer.usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{"response_format": in_format(PERSON)}, {"guided_regex": "[a-z]{100}"}, {"guided_choice": ["ab " * 50]}],
    ids=str,
)
def test_an_answer_that_is_cut_says_so(client, fields, stream):
    answer = ask(client, max_tokens=4, extra_body=fields, stream=stream)
    assert (read(answer)[1] if stream else answer.choices[0].finish_reason) == "length"


def test_many_shapes_at_once_do_not_mix(server):
    async def one(client, idx: int) -> bool:
        word = chr(ord("a") + idx) * 6
        fields = {"guided_regex": f"({word}){{3,9}}"} if idx % 3 else {}
        options = {"model": "smollm2", "messages": ASK, "max_tokens": 40, "temperature": 1.5}
        answer = await client.chat.completions.create(**options, extra_body=fields)
        return not fields or set(answer.choices[0].message.content) == {word[0]}

    async def all_of_them() -> list[bool]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, idx) for idx in range(12)))

    assert all(asyncio.run(all_of_them()))


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    ({"response_format": in_format({"type": "array", "uniqueItems": True})}, "uniqueItems"),
    ({"response_format": in_format({"properties": {"a": {"format": "iri"}}})}, "iri"),
    ({"response_format": in_format({"type": "strin"})}, "strin"),
    ({"response_format": in_format(["a"])}, "schema"),
    ({"response_format": in_format(False)}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "format"),
    ({"response_format": {"type": "json_object"}, "guided_json": NUMBER}, "guided_json"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens"),
    ({"guided_regex": "a(b"}, "regex"),
    ({"guided_regex": ""}, "regex"),
    ({"guided_json": "{"}, "json"),
    ({"guided_json": ""}, "json"),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_grammar": "root ::= nobody"}, "nobody"),
    ({"guided_grammar": "start: /(/"}, "grammar"),
    ({"guided_grammar": "nonsense"}, "grammar"),
    ({"guided_grammar": ""}, "grammar"),
    ({"grammar": "root ::= nobody"}, "nobody"),
    ({"grammar": 'start: "a"'}, "a rule must begin"),
    ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, "response_format and grammar exclude"),
    ({"json_schema": NUMBER, "structured_outputs": {"regex": "a"}}, "structured_outputs and json_schema exclude"),
    ({"json_schema": NUMBER, "grammar": 'root ::= "a"'}, "grammar and json_schema exclude"),
    ({"json_schema": {"type": "strin"}}, "strin"),
    ({"n_predict": 5}, "n_predict and max_tokens exclude"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repeat_penalty and repetition_penalty exclude"),
    ({"guided_choice": []}, "choice"),
    ({"guided_choice": [""]}, "choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"structured_outputs": {"choice": []}}, "choice"),
    ({"structured_outputs": {"structural_tag": {"type": "tag"}}}, "structural_tag"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_choice": ["yes", "no"], "allowed_token_ids": [5, 6]}, "allowed_token_ids"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(server, fields, says, stream):
    for path, prompt in (("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "It is"})):
        answer = server.post(path, {**prompt, "max_tokens": 8, "stream": stream, **fields})
        assert answer.status_code == 400, answer.text[:200]  # a stream is refused before it begins
        error = answer.json()["error"]
        assert says in error["message"] and error["type"] == "invalid_request_error"
        assert not re.search(r"0x[0-9a-f]{4}|Traceback|\.(py|cc|rs)\b", error["message"]), error


# -- hostile shapes ----------------------------------------------------------------------------------------------------


def _chain(length: int) -> dict:
    """Each definition uses the next one four times: as a tree it has 4^length leaves."""
    defs: dict[str, dict] = {}
    for idx in range(length):
        next_one = {"$ref": f"#/$defs/d{idx + 1}"}
        as_object = {"type": "object", "properties": {"l": next_one, "r": next_one}}
        as_array = {"type": "array", "prefixItems": [next_one, next_one]}
        defs[f"d{idx}"] = {"anyOf": [as_object, as_array]}
    return {"$defs": {**defs, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _one_of_four(idx: int) -> dict:
    return {"anyOf": [{"required": [f"p{idx}{other}"]} for other in range(4)]}


def _explosion(length: int) -> str:
    """Each rule is eight times the next one, or less: 8^length ways through."""
    rules = [f"r{idx} ::= " + " ".join([f"r{idx + 1}?"] * 8) for idx in range(length)]
    return "\n".join([*rules, f'r{length} ::= "x"']).replace("r0", "root")


def _tags(count: int) -> dict:
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [TAG] * count}}


HOSTILE = {
    "laughs": {"guided_json": _chain(30)},
    "deep": {"guided_json": '{"not":' * 5000 + "{}" + "}" * 5000},
    "cases": {"guided_json": {"allOf": [_one_of_four(idx) for idx in range(12)]}},
    "loop": {"guided_json": {"$ref": "#"}},
    "endless": {"guided_json": {"type": "array", "minItems": 10**9}},
    "large": {"guided_json": {"enum": ["x" * 140_000]}},
    "backtracking": {"guided_regex": "(a+)+$"},
    "counts": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "automaton": {"guided_regex": "(a|b)*a(a|b){200}"},
    "parentheses": {"guided_regex": "(" * 2000 + "a" + ")" * 2000},
    "pattern": {"guided_json": {"type": "string", "pattern": "^(a|b)*a(a|b){500}$"}},
    "branches": {"guided_regex": "(" + "|".join("a" * idx + "b?" for idx in range(1, 300)) + ")*c"},
    "choices": {"guided_choice": [str(idx) for idx in range(10_001)]},
    "values": {"guided_json": {"enum": [f"v{idx}" * 3 for idx in range(5000)]}},
    "recursion": {"guided_grammar": 'root ::= root root | "a"'},
    "nothing": {"guided_grammar": "root ::= a\na ::= b\nb ::= a"},
    "explosion": {"guided_grammar": _explosion(20)},
    "explosion, as llama.cpp reads it": {"grammar": _explosion(20)},
    "counts in counts": {"grammar": 'root ::= ((("a"{0,90}){0,90}){0,90}){0,90}'},
    "tags": {"structured_outputs": {"structural_tag": _tags(3000)}},
}


class Watched:
    """A plain stream beside others' requests: when its events came."""

    def __init__(self, server: ServerProcess) -> None:
        self.times: list[float] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(server.url,), daemon=True)

    def _read(self, url: str) -> None:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "temperature": 0, "stream": True}
        while not self.stop.is_set():
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    self.times += [time.monotonic()] * bool(line)
                    if self.stop.is_set():
                        return

    def __enter__(self) -> "Watched":
        self.thread.start()
        while len(self.times) < 40:
            time.sleep(0.02)
        self.alone_per_s = 30 / (self.times[39] - self.times[9])  # events, while nobody else asks for anything
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        self.thread.join(30)

    @property
    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in zip(self.times, self.times[1:]))


def test_hostile_shapes_are_refused_or_bounded_and_others_keep_their_pace(server):
    with Watched(server) as other:
        for name, fields in HOSTILE.items():
            started, num_before = time.monotonic(), len(other.times)
            answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 8, "seed": 1, **fields})
            took_s = time.monotonic() - started
            assert answer.status_code in (200, 400), (name, answer.text[:200])
            assert took_s < 60, name
            if took_s > 1:
                assert len(other.times) - num_before > 0.05 * other.alone_per_s * took_s, name
    assert other.longest_gap_s < max(1.5, 20 / other.alone_per_s)
    assert server.get("/health").status_code == 200


# -- a core that dies --------------------------------------------------------------------------------------------------


def test_a_structured_stream_survives_the_death_of_the_engine(server, client):
    colours = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 30, "maxItems": 40}
    core, num_events, text = server.core_pid(), 0, ""
    for event in ask(client, response_format=in_format(colours), max_tokens=400, temperature=1, stream=True):
        num_events += 1
        if num_events == 12:
            os.kill(core, signal.SIGKILL)
        text += event.choices[0].delta.content or ""
        end = event.choices[0].finish_reason
    assert end == "stop" and jsonschema_rs.is_valid(colours, json.loads(text)), text
    assert server.core_pid() != core
