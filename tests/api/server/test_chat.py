"""/v1/chat/completions through the real `openai` client. Each test of a parameter fails if the parameter is ignored."""

import asyncio
import json
import math
import threading
import time

import httpx
import openai
import pytest

from quire.api.server import fields
from tests.serving import until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def ask(client, messages=QUESTION, **options):
    """One greedy answer of up to 16 tokens; fields the client does not know go into the body as they are."""
    known = {"temperature": 0, "max_tokens": 16, **options}
    extra = {name: known.pop(name) for name in list(known) if name in EXTRA}
    return client.chat.completions.create(model="smol", messages=messages, extra_body=extra, **known)


EXTRA = """
    top_k min_p repetition_penalty repeat_penalty n_predict min_tokens stop_token_ids include_stop_str_in_output
    ignore_eos bad_words
    allowed_token_ids prompt_logprobs priority cache_salt chat_template_kwargs continue_final_message
    add_generation_prompt return_token_ids skip_special_tokens timeout_s chat_template zzz
""".split()


def text(client, messages=QUESTION, **options) -> str:
    return ask(client, messages, **options).choices[0].message.content


def ids(server, words: str) -> list[int]:
    return httpx.post(server.url + "/tokenize", json={"prompt": words}).json()["tokens"]


def prompt_of(server, answer) -> str:
    return httpx.post(server.url + "/detokenize", json={"tokens": answer.prompt_token_ids}).json()["prompt"]


# -- the shape of an answer --------------------------------------------------------------------------------------------


def test_a_question_is_answered(client):
    answer = ask(client)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "smol"
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    usage = answer.usage
    assert usage.completion_tokens == 8 and usage.total_tokens == usage.prompt_tokens + 8


def test_a_stream_gives_the_same_text_event_by_event(client):
    events = list(ask(client, stream=True))
    assert {event.id for event in events} == {events[0].id} and events[0].object == "chat.completion.chunk"
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content for event in events) == ANSWER
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert 4 <= len(events) <= 1 + 8  # the role, then one per token; a reader that falls behind gets some together
    assert all(event.usage is None for event in events)


def test_a_stream_ends_with_done(smol):
    body = {"messages": QUESTION, "stream": True, "max_tokens": 2}
    answer = httpx.post(smol.url + "/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_the_async_client_streams_many_answers_at_once(smol):
    async def one(client):
        options = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        stream = await client.chat.completions.create(**options, stream=True)
        return "".join([event.choices[0].delta.content async for event in stream])

    async def all_of_them():
        async with smol.async_client() as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(all_of_them()) == [ANSWER] * 8


def test_raw_responses_show_the_request_id(client):
    raw = client.chat.completions.with_raw_response.create(
        model="smol", messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.parse().id == "chatcmpl-my-own-id"


def test_two_calls_may_bring_the_same_request_id(smol):
    async def both():
        async with smol.async_client(default_headers={"X-Request-Id": "twin"}) as client:
            options = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
            calls = [client.chat.completions.create(**options) for _ in range(2)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(both()) == [ANSWER] * 2


def test_every_served_name_works_and_others_do_not(client):
    assert client.chat.completions.create(model="smol-alias", messages=QUESTION, max_tokens=1).model == "smol-alias"
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert [model.id for model in client.models.list()] == ["smol", "smol-alias"]
    assert client.models.retrieve("smol-alias").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


# -- choosing tokens ---------------------------------------------------------------------------------------------------


def test_temperature_makes_answers_differ(client):
    assert text(client, temperature=5, seed=1) != ANSWER


def test_without_a_temperature_openais_default_is_used(client):
    assert len({text(client, temperature=openai.omit, max_tokens=6, seed=seed) for seed in range(4)}) > 1


def test_a_seed_repeats_an_answer(client):
    hot = [text(client, temperature=2, seed=seed, max_tokens=6) for seed in (7, 7, 8)]
    assert hot[0] == hot[1] != hot[2]
    assert text(client, temperature=2, max_tokens=6) != text(client, temperature=2, max_tokens=6)


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_a_narrow_choice_is_greedy_at_any_temperature(client, narrow):
    assert text(client, temperature=5, seed=1, **narrow) == ANSWER


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 5}], ids=str
)
def test_penalties_break_repetition(client, penalty):
    again = [{"role": "user", "content": "Say the word dog twelve times: dog dog dog dog"}]
    plain, penalized = (text(client, again, max_tokens=16, **options) for options in ({}, penalty))
    assert plain != penalized


def test_logit_bias_forbids_and_forces(smol, client):
    (paris,), (rome,) = ids(smol, " Paris"), ids(smol, " Rome")
    assert "Paris" not in text(client, logit_bias={str(paris): -100})
    assert text(client, logit_bias={str(rome): 100}, max_tokens=3) == " Rome Rome Rome"


def test_bad_words_do_not_occur(client):
    assert "Paris" not in text(client, bad_words=["Paris"])


def test_only_allowed_tokens_occur(smol, client):
    allowed = ids(smol, " yes no")
    answer = ask(client, allowed_token_ids=allowed, return_token_ids=True, max_tokens=6)
    assert set(answer.choices[0].token_ids) <= set(allowed)


def test_n_answers_are_numbered(client):
    answer = ask(client, n=3, temperature=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    texts = ["", "", ""]
    for event in ask(client, n=3, temperature=2, seed=1, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content
    assert texts == [choice.message.content for choice in answer.choices]


# -- ending ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_an_answer_has_a_longest_length(client, name):
    answer = ask(client, **{"max_tokens": openai.omit, name: 3})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_without_a_longest_length_an_answer_may_fill_the_context(client):
    long = [{"role": "user", "content": "word " * 460}]
    answer = ask(client, long, max_tokens=openai.omit, ignore_eos=True)
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


def test_names_of_llama_cpp_mean_the_same(client):
    assert text(client, repeat_penalty=1.7) == text(client, repetition_penalty=1.7) != text(client)
    for twin in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError, match=f"n_predict and {twin} exclude each other"):
            ask(client, **{"max_tokens": openai.omit, "n_predict": 3, twin: 3})


def test_min_tokens_and_ignore_eos_go_past_the_end(client):
    assert ask(client, min_tokens=12).usage.completion_tokens >= 12
    assert ask(client, ignore_eos=True).usage.completion_tokens == 16


def test_a_stop_string_ends_the_answer(client):
    answer = ask(client, stop=" France")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The capital of", "stop")
    assert answer.choices[0].stop_reason == " France"
    assert text(client, stop=["nowhere", "is Pa"]) == "The capital of France "
    assert text(client, stop=" France", include_stop_str_in_output=True) == "The capital of France"
    streamed = "".join(event.choices[0].delta.content for event in ask(client, stop="is Pa", stream=True))
    assert streamed == "The capital of France "


def test_a_stop_token_ends_the_answer(smol, client):
    (france,) = ids(smol, " France")
    answer = ask(client, stop_token_ids=[france])
    assert (answer.choices[0].message.content, answer.choices[0].stop_reason) == ("The capital of", france)


def test_special_tokens_are_shown_when_asked(client):
    assert "<|im_end|>" in text(client, ignore_eos=True, skip_special_tokens=False)
    assert "<|im_end|>" not in text(client, ignore_eos=True)


def test_a_deadline_ends_a_request(echo):
    with pytest.raises(openai.APIStatusError) as error:
        ask(echo.client(max_retries=3), max_tokens=500, timeout_s=0.2)
    assert error.value.status_code == 408 and error.value.response.headers["x-should-retry"] == "false"
    assert error.value.code == "deadline_exceeded"


def test_a_deadline_in_the_middle_of_a_stream_is_an_error_event(echo):
    events = []
    with pytest.raises(openai.APIError, match=r"\w"):
        for event in ask(echo.client(), max_tokens=500, timeout_s=1, stream=True):
            events.append(event)
    assert len(events) > 5


# -- looking inside ----------------------------------------------------------------------------------------------------


def test_logprobs_tell_how_likely_tokens_were(client):
    (choice,) = ask(client, logprobs=True, top_logprobs=3).choices
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == ANSWER + "<|im_end|>"
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True) and sum(map(math.exp, tops)) <= 1
        assert entry.top_logprobs[0].token == entry.token and entry.logprob == tops[0]  # greedy
    streamed = []
    for event in ask(client, logprobs=True, top_logprobs=3, stream=True):
        if event.choices[0].logprobs is not None:
            streamed += event.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert ask(client).choices[0].logprobs is None
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_logprobs_cover_the_prompt(client):
    answer = ask(client, prompt_logprobs=2, max_tokens=1, return_token_ids=True)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens and answer.prompt_logprobs[0] is None
    for token_id, entry in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:]):
        assert str(token_id) in entry and len(entry) >= 2
        assert all(value["logprob"] <= 0 and value["rank"] >= 1 for value in entry.values())


def test_token_ids_are_returned_when_asked(smol, client):
    answer = ask(client, return_token_ids=True)
    assert answer.choices[0].token_ids == [*ids(smol, ANSWER), 2]
    assert "What is the capital of France?" in prompt_of(smol, answer)
    events = list(ask(client, return_token_ids=True, stream=True))
    assert events[0].prompt_token_ids == answer.prompt_token_ids
    streamed = [token_id for event in events[1:] for token_id in event.choices[0].token_ids]
    assert streamed == answer.choices[0].token_ids


def test_usage_comes_at_the_end_of_a_stream(client):
    *events, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 8 and all(event.usage is None for event in events)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event.usage.completion_tokens for event in ask(client, stream=True, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == 8 and len(set(counts)) >= 3


def test_usage_tells_what_was_cached_and_a_salt_keeps_apart(client):
    long = [{"role": "user", "content": "Tell me about the sea, the ships and the weather. " * 5}]

    def cached(**options):
        return ask(client, long, max_tokens=1, **options).usage.prompt_tokens_details.cached_tokens

    cached()
    assert cached() >= 32
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") >= 32


# -- the prompt --------------------------------------------------------------------------------------------------------


def test_a_final_message_can_be_continued(smol, client):
    begun = [*QUESTION, {"role": "assistant", "content": "Paris is"}]
    answer = ask(client, begun, continue_final_message=True, return_token_ids=True, max_tokens=1)
    assert prompt_of(smol, answer).endswith("<|im_start|>assistant\nParis is")
    answer = ask(client, begun, return_token_ids=True, max_tokens=1)
    assert prompt_of(smol, answer).endswith("Paris is<|im_end|>\n<|im_start|>assistant\n")
    answer = ask(client, begun, add_generation_prompt=False, return_token_ids=True, max_tokens=1)
    assert prompt_of(smol, answer).endswith("Paris is<|im_end|>\n")


def test_the_template_gets_arguments(echo):
    options = {"chat_template_kwargs": {"style": "terse "}, "reasoning_effort": "low"}
    answer = ask(echo.client(), **options, return_token_ids=True, max_tokens=1)
    assert prompt_of(echo, answer) == "terse user: What is the capital of France?\nlow"


def test_text_parts_are_text(smol, client):
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    answer = ask(client, [{"role": "user", "content": parts}], return_token_ids=True, max_tokens=1)
    assert "What is the capital\nof France?" in prompt_of(smol, answer)


def test_special_tokens_in_messages_stay_text(client):
    spelled = [{"role": "user", "content": "<|im_end|>"}]
    plain = ask(client, spelled, return_token_ids=True, max_tokens=1).prompt_token_ids
    assert plain.count(2) == 2  # the ends of the template's own two turns


# -- many clients ------------------------------------------------------------------------------------------------------


def test_a_lower_priority_runs_first(echo):
    """One request runs, two wait; the one that came last is more urgent."""
    done = []

    def wait(name, priority):
        ask(echo.client(), max_tokens=10, priority=priority, ignore_eos=True)
        done.append(name)

    with ask(echo.client(), max_tokens=150, stream=True, ignore_eos=True) as running:
        next(iter(running))
        threads = [threading.Thread(target=wait, args=each) for each in (("patient", 5), ("urgent", -5))]
        for num_before, thread in enumerate(threads, 1):
            thread.start()
            until(lambda wanted=num_before + 1: len(echo.llm.cores.live) == wanted)
        for thread in threads:
            thread.join()
    assert done == ["urgent", "patient"]


def test_a_full_server_says_when_to_come_back(echo):
    patient, hasty = echo.client(max_retries=5), echo.client()
    with ask(hasty, max_tokens=150, stream=True, ignore_eos=True) as running:
        next(iter(running))
        threads = [threading.Thread(target=ask, args=(hasty,), kwargs={"max_tokens": 5}) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(echo.llm.cores.live) == 4)
        with pytest.raises(openai.InternalServerError) as error:
            ask(hasty, max_tokens=1)
        assert error.value.status_code == 503 and int(error.value.response.headers["retry-after"]) >= 1
        assert ask(patient, max_tokens=1).usage.completion_tokens == 1  # the client tries again by itself
        for thread in threads:
            thread.join()


def test_a_client_that_stops_reading_frees_its_request(echo):
    with ask(echo.client(), max_tokens=1500, ignore_eos=True, stream=True) as running:
        next(iter(running))
        assert len(echo.llm.cores.live) == 1
    until(lambda: not echo.llm.cores.live)  # it would run for 15 s


def test_a_client_that_gives_up_waiting_frees_its_request(echo):
    with pytest.raises(openai.APITimeoutError):
        ask(echo.client(timeout=0.3), max_tokens=1500, ignore_eos=True)
    until(lambda: not echo.llm.cores.live)


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},  # its template knows none
    {"tool_choice": "required"},
    {"functions": [{"name": "f"}]},
    {"function_call": "auto"},
    {"web_search_options": {}},
    {"verbosity": "high"},
    {"audio": {"voice": "alloy", "format": "wav"}},
    {"modalities": ["text", "audio"]},
    {"chat_template": "{{ 1 }}"},
    {"watermarking": {"scheme": "x"}},
    {"thinking_token_budget": 9},  # this model does not think
]
WRONG = [
    {"temperature": -1},
    {"temperature": "warm"},
    {"top_p": 0},
    {"n": 0},
    {"n": 100000},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"min_tokens": 20, "max_tokens": 10},
    {"top_k": 2**63},  # more than a message or a tensor holds
    {"max_tokens": 2**64},
    {"top_logprobs": 2},
    {"top_logprobs": 1000, "logprobs": True},
    {"logit_bias": {"x": 1}},
    {"stop": [""]},
    {"stop": ["a"] * 1000},
    {"request_id": "two words"},
    {"request_id": "line\n"},
    {"truncation_side": "middle"},
    {"truncate_prompt_tokens": -2},
    {"documents": "text"},
    {"logprob_token_ids": [5]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [10**9]},
    {"allowed_token_ids": []},
    {"priority": 2**40},
    {"cache_salt": "x" * 10000},
    {"timeout_s": 0},
    {"stream_options": {"include_usage": True}},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
    {"messages": [{"role": "user", "content": "hi"}] * 5000},
    {"messages": [{"role": "user", "content": "word " * 600}]},
    {"chat_template_kwargs": {"tokenize": False}},
    {"seed": 2**64},
]


@pytest.mark.parametrize("body", [*REFUSED, *WRONG], ids=lambda body: next(iter(body)))
def test_what_cannot_be_served_is_refused_by_name(smol, body):
    answer = httpx.post(smol.url + "/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    name = next(iter(body))
    if name not in ("messages", "chat_template_kwargs"):
        assert (error["param"] or "").startswith(name) and name in error["message"]
    assert "0x" not in error["message"] and "Traceback" not in error["message"]


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, temperature=-1)
    assert error.value.param == "temperature" and "between 0 and" in error.value.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nonsense", b'{"messages": NaN}', b"\xff\xfe", b'{"messages": "\\ud800"}'], ids=repr
)
def test_a_body_that_is_no_json_object_is_refused(smol, body):
    answer = httpx.post(smol.url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_fields_without_effect_are_welcome(client):
    quiet = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False}
    usual = {"tool_choice": "none", "tools": [], "response_format": {"type": "text"}, "modalities": ["text"]}
    assert text(client, **usual, **quiet) == ANSWER


def test_an_unknown_field_is_ignored_with_one_warning(client, caplog, monkeypatch):
    monkeypatch.setattr(fields, "_warned", set())
    for _ in range(3):
        assert text(client, zzz=1) == ANSWER
    assert sum("zzz" in record.getMessage() for record in caplog.records) == 1


def test_wrong_paths_and_methods_are_answered_in_the_same_shape(smol):
    assert httpx.get(smol.url + "/v1/nothing").json()["error"]["code"] == "not_found"
    answer = httpx.get(smol.url + "/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


# -- predicted answers -------------------------------------------------------------------------------------------------

LONG = [{"role": "user", "content": "Count from one to twenty in words."}]


@pytest.mark.parametrize("form", ["text", "parts"])
def test_a_prediction_changes_no_word_and_its_tokens_are_counted(client, form):
    plain = ask(client, LONG, max_tokens=40)
    words = plain.choices[0].message.content
    content = words if form == "text" else [{"type": "text", "text": words[:20]}, {"type": "text", "text": words[20:]}]
    answer = ask(client, LONG, max_tokens=40, prediction={"type": "content", "content": content})
    assert answer.choices[0].message.content == words
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 15
    assert plain.usage.completion_tokens_details is None
    wrong = ask(client, LONG, max_tokens=40, prediction={"type": "content", "content": words[:30] + " No. Never!"})
    assert wrong.choices[0].message.content == words
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "prediction: "),
        ({"type": "content"}, "prediction.content is missing"),
        ({"type": "content", "content": 5}, "prediction.content: "),
        ({"type": "other", "content": "x"}, "prediction.type: "),
        ({"type": "content", "content": "word " * 9000}, "the prediction is longer than the context of 512 tokens"),
    ],
)
def test_a_prediction_that_is_none_is_refused(client, prediction, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, prediction=prediction)
