"""Request fields: those of vLLM are all known, and those that say how a prompt is made or shown do what they say."""

import json
from pathlib import Path

import httpx
import openai
import pytest

from quire.api.server import chat, completions, fields, tokens
from quire.api.server.anthropic.body import CountTokensRequest, MessagesRequest
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.frontend.model import ModelInfo
from quire.params import StructuredOutputs
from tests.api.server.fields_page import PAGE, page

VLLM = json.loads((Path(__file__).parents[2] / "data" / "vllm_fields.json").read_text())
OURS = {
    "ChatCompletionRequest": chat.ChatRequest,
    "CompletionRequest": completions.CompletionRequest,
    "AnthropicMessagesRequest": MessagesRequest,
    "AnthropicCountTokensRequest": CountTokensRequest,
    "TokenizeCompletionRequest": tokens.TokenizeRequest,
    "TokenizeChatRequest": tokens.TokenizeRequest,
    "DetokenizeRequest": tokens.DetokenizeRequest,
    "StreamOptions": fields.StreamOptions,
    "StructuredOutputsParams": StructuredOutputs,
    "RepetitionDetectionParams": fields.Repetition,
}
SEA = "The sea is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "The capital is"}]


def post(server, path: str, **body) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def complete(server, **body) -> dict:
    answer = post(server, "/v1/completions", **{"prompt": SEA, "max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server, **body) -> dict:
    answer = post(server, "/v1/chat/completions", **{"messages": QUESTION, "max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(response: httpx.Response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


def ids(server, text: str, **body) -> list[int]:
    return post(server, "/tokenize", prompt=text, **body).json()["tokens"]


@pytest.mark.parametrize("name", VLLM)
def test_no_field_of_vllm_is_unknown(name):
    ours = OURS[name]
    known = {*ours.__struct_fields__, *getattr(ours, "no_effect", ()), *getattr(ours, "refused", ())}
    assert not set(VLLM[name]) - known


def test_the_page_lists_every_field():
    """If not: python -m tests.api.server.fields_page"""
    assert PAGE.read_text() == page()


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_at_either_end(smol):
    text = "one two three four five six seven eight nine ten"
    whole = ids(smol, text)

    def kept(**body) -> list[int]:
        return complete(smol, **{"prompt": text, **body}, return_token_ids=True)["choices"][0]["prompt_token_ids"]

    assert kept(truncate_prompt_tokens=4) == whole[:4]
    assert kept(truncate_prompt_tokens=4, truncation_side="left") == whole[-4:]
    assert kept(truncate_prompt_tokens=400, truncation_side="left") == kept(truncation_side="left") == whole
    assert kept(prompt=whole, truncate_prompt_tokens=3) == whole[:3]
    assert complete(smol, prompt=text, truncate_prompt_tokens=2, echo=True)["choices"][0]["text"].startswith("one two")


def test_a_prompt_that_is_far_too_long_is_cut_to_leave_room_for_the_answer(smol):
    for path, body in (
        ("/v1/completions", {"prompt": "word " * 30_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2000}]}),
    ):
        answer = post(smol, path, **body, max_tokens=12, truncate_prompt_tokens=-1, ignore_eos=True)
        assert answer.json()["usage"]["prompt_tokens"] == 500 and answer.json()["usage"]["completion_tokens"] == 12


def test_documents_and_default_arguments_reach_the_template(smollm2, tmp_path):
    template = "{{ style }}{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ messages[0].content }}"
    from tests.api.server.conftest import serving

    options = {"executor": "echo", "chat_template": template, "default_chat_template_kwargs": {"style": "calm "}}
    with serving("smollm2", **options) as server:
        documents = [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]
        body = {"messages": QUESTION, "documents": documents}
        for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
            answer = post(server, path, **body, return_prompt_text=True, max_tokens=1).json()
            assert answer.get("prompt_text", answer.get("prompt")).startswith("calm A: x\nB: y\nWhat")
        kwargs = {"chat_template_kwargs": {"style": "terse "}}
        answer = post(server, "/v1/chat/completions/render", messages=QUESTION, **kwargs).json()
        assert answer["prompt"].startswith("terse What")


def test_the_tokenizers_own_tokens_can_be_added_to_a_chat(echo):
    plain = post(echo, "/tokenize", messages=QUESTION).json()["tokens"]
    assert post(echo, "/tokenize", messages=QUESTION, add_special_tokens=True).json()["tokens"] == [1, *plain]
    body = {"return_token_ids": True, "add_special_tokens": True}
    assert ask(echo, **body)["prompt_token_ids"] == [1, *plain]


def test_null_characters_are_part_of_prompts(smol):
    assert complete(smol, prompt="a\0b", echo=True)["choices"][0]["text"].startswith("a\0b")
    answer = ask(smol, messages=[{"role": "user", "content": "a\0b"}], return_prompt_text=True)
    assert "a\0b" in answer["prompt_text"]


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_echoing_chat_begins_with_the_final_message(smol):
    body = {"messages": BEGUN, "continue_final_message": True}
    plain = ask(smol, **body)["choices"][0]["message"]["content"]
    assert ask(smol, **body, echo=True)["choices"][0]["message"]["content"] == "The capital is" + plain
    events = list(smol.client().chat.completions.create(
        model="smol", messages=BEGUN, max_tokens=4, temperature=0, stream=True,
        extra_body={"continue_final_message": True, "echo": True},
    ))  # fmt: skip
    assert "".join(event.choices[0].delta.content or "" for event in events) == "The capital is" + plain
    assert not ask(smol, echo=True)["choices"][0]["message"]["content"].startswith("What")  # it is the user's


def test_tokens_are_shown_as_ids_where_asked(smol):
    chosen = complete(smol, logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
    assert chosen["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in chosen["token_ids"]]
    assert all(name.startswith("token_id:") for top in chosen["logprobs"]["top_logprobs"] for name in top)
    body = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    entries = ask(smol, **body)["choices"][0]
    shown = [entry["token"] for entry in entries["logprobs"]["content"]]
    assert shown == [f"token_id:{token_id}" for token_id in entries["token_ids"]]
    assert bytes(entries["logprobs"]["content"][0]["bytes"]).decode().isalpha()


def test_logprobs_of_named_tokens_are_returned(smol):
    names = ids(smol, " blue"), ids(smol, " green")
    wanted = [token_id for (token_id,) in names]
    columns = complete(smol, logprobs=1, logprob_token_ids=wanted)["choices"][0]["logprobs"]
    assert all({" blue", " green"} <= top.keys() for top in columns["top_logprobs"])
    entries = ask(smol, logprobs=True, logprob_token_ids=wanted)["choices"][0]["logprobs"]["content"]
    assert all({" blue", " green"} <= {top["token"] for top in entry["top_logprobs"]} for entry in entries)


def test_an_answer_has_the_id_that_was_asked_for(smol):
    assert ask(smol, request_id="mine-1.a")["id"] == "chatcmpl-mine-1.a"
    assert complete(smol, request_id="mine-2")["id"] == "cmpl-mine-2"
    answer = post(smol, "/v1/completions/render", prompt=SEA, request_id="mine-3").json()
    assert answer[0]["request_id"] == "cmpl-mine-3"


def test_answers_and_events_have_the_same_fingerprint(client):
    chat = client.chat.completions.create(model="smol", messages=QUESTION, max_tokens=2)
    events = client.chat.completions.create(model="smol", messages=QUESTION, max_tokens=2, stream=True)
    completion = client.completions.create(model="smol", prompt=SEA, max_tokens=2)
    found = {chat.system_fingerprint, completion.system_fingerprint, *(event.system_fingerprint for event in events)}
    assert len(found) == 1 and "/" not in found.pop()


def test_a_bias_out_of_range_is_brought_into_range(smol):
    (token_id,) = ids(smol, " green")
    far, most = (complete(smol, logit_bias={str(token_id): bias}) for bias in (1000, 100))
    assert far["choices"] == most["choices"] and far["choices"][0]["text"].count(" green") == 4


def test_vllms_arguments_for_extensions_are_extra_args(smol):
    body = {"prompt": "a", "vllm_xargs": {"a": 1, "b": [2]}, "extra_args": {"a": 3}}
    (rendered,) = post(smol, "/v1/completions/render", **body).json()
    assert rendered["sampling_params"]["extra_args"] == {"a": 3, "b": [2]}


def test_repetition_ends_an_answer(echo):
    body = {"prompt": [5] * 8, "max_tokens": 500, "ignore_eos": True}
    answer = complete(echo, **body, repetition_detection={"max_pattern_size": 2, "min_count": 4})
    assert answer["choices"][0]["finish_reason"] == "repetition" and answer["usage"]["completion_tokens"] == 4


# -- errors ------------------------------------------------------------------------------------------------------------

LONG = [{"role": "user", "content": "word " * 600}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": LONG}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 90_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 500}, "messages"),
        ("/v1/chat/completions", {"messages": QUESTION, "max_completion_tokens": 10**9}, "messages"),
        ("/v1/completions", {"prompt": "word " * 600}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 90_000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 512}, "prompt"),
        ("/v1/completions", {"prompt": SEA, "max_tokens": 510}, "prompt"),
        ("/v1/completions/render", {"prompt": SEA, "max_tokens": 510}, "prompt"),
    ],
)
def test_what_is_longer_than_the_context_is_refused_in_openais_words(smol, path, body, param):
    found = error(post(smol, path, **body))
    assert (found["code"], found["param"], found["type"]) == ("context_length_exceeded", param, "invalid_request_error")
    assert found["message"].startswith("This model's maximum context length is 512 tokens. However, you requested ")
    assert "--" not in found["message"]


def test_what_just_fits_is_served(smol):
    assert complete(smol, prompt=[5] * 508, ignore_eos=True)["usage"]["total_tokens"] == 512
    found = error(post(smol, "/v1/completions", prompt=[5] * 508, max_tokens=5))
    assert "you requested 513 tokens (508 in the prompt, 5 in the completion)" in found["message"]
    answer = post(smol, "/v1/completions", prompt=[5] * 505, ignore_eos=True).json()  # 16 is only the usual length
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("value", [3.0, "3"])
def test_a_number_may_be_written_as_a_fraction_or_a_text(smol, value):
    """Some clients know no other way, and vLLM takes both."""
    answer = complete(smol, max_tokens=value, ignore_eos=True, temperature="0", stream="false", return_token_ids=1)
    assert answer["usage"]["completion_tokens"] == 3 and len(answer["choices"][0]["token_ids"]) == 3
    same = complete(smol, prompt="3", max_tokens=1, return_token_ids=True)  # what is a text stays one
    assert same["choices"][0]["prompt_token_ids"] == ids(smol, "3")


CODES = [
    ({}, "messages", "missing_required_parameter"),
    ({"messages": QUESTION, "n": "two"}, "n", "invalid_type"),
    ({"messages": QUESTION, "n": 0}, "n", "integer_below_min_value"),
    ({"messages": QUESTION, "priority": 2**40}, "priority", "integer_above_max_value"),
    ({"messages": QUESTION, "cache_salt": "x" * 300}, "cache_salt", "string_above_max_length"),
    ({"messages": QUESTION, "stop": ["a"] * 50}, "stop", "array_above_max_length"),
    ({"messages": QUESTION, "temperature": -1}, "temperature", "invalid_value"),
    ({"messages": QUESTION, "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    ({"messages": QUESTION, "use_beam_search": True, "stream": True}, "stream", "invalid_value"),
    ({"messages": QUESTION, "watermarking": True}, "watermarking", "unsupported_parameter"),
    ({"messages": QUESTION, "max_tokens": 2.5}, "max_tokens", "invalid_type"),
    ({"messages": QUESTION, "max_tokens": True}, "max_tokens", "invalid_type"),
    ({"messages": QUESTION, "temperature": "nan"}, "temperature", "invalid_value"),
    ({"messages": QUESTION, "kv_transfer_params": {"a": 1}}, "kv_transfer_params", "unsupported_parameter"),
    ({"messages": QUESTION, "prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
]


@pytest.mark.parametrize(("body", "param", "code"), CODES, ids=[code for _, _, code in CODES])
def test_errors_have_openais_codes_and_name_the_field(smol, body, param, code):
    found = error(post(smol, "/v1/chat/completions", **body))
    assert (found["param"], found["code"]) == (param, code)


def test_a_stream_that_fails_in_the_middle_says_so_and_is_done(echo):
    body = {"prompt": SEA, "max_tokens": 1500, "ignore_eos": True, "stream": True, "timeout_s": 0.4}
    *events, failure, done = post(echo, "/v1/completions", **body).text.strip().split("\n\n")
    assert len(events) > 5 and done == "data: [DONE]"
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    with pytest.raises(openai.APIError):
        list(echo.client().completions.create(model="smol", prompt=SEA, max_tokens=1500, stream=True, extra_body=body))


# -- defaults of the operator ------------------------------------------------------------------------------------------


def test_the_operator_chooses_sampling_defaults(smollm2):
    options = {"override_generation_config": {"temperature": 0.25, "top_k": 7, "max_new_tokens": 9, "other": 1}}
    model = ModelInfo.open(EngineConfig.from_kwargs(model="smollm2", **options))
    params = model.default_params(top_k=3)
    assert (params.temperature, params.top_k) == (0.25, 3)
    assert [model.max_answer_tokens(asked) for asked in (None, 5, 50)] == [9, 5, 9]


@pytest.mark.parametrize(
    "options",
    [
        {"override_generation_config": {"temperature": -1}},
        {"override_generation_config": {"max_new_tokens": "many"}},
        {"default_chat_template_kwargs": {"messages": []}},
        {"default_chat_template_kwargs": {"two words": 1}},
    ],
)
def test_defaults_that_no_request_could_use_are_refused_at_the_start(smollm2, options):
    with pytest.raises(ConfigError, match=next(iter(options)).replace("_", "-")):
        ModelInfo.open(EngineConfig.from_kwargs(model="smollm2", **options))
