"""/v1/completions through the real `openai` client: forms of prompts, numbering, echo, logprobs."""

import math

import httpx
import openai
import pytest

from quire import SamplingParams
from quire.api.server.logprobs import CompletionLogprobsWriter
from quire.frontend.tokenizer import Tokenizer
from quire.step import TokenLogprobs

SEA, HILL = "The sea is", "The hill is"


def complete(client, prompt=SEA, **options):
    return client.completions.create(model="smol", prompt=prompt, **{"temperature": 0, "max_tokens": 5, **options})


def tokens(server, text: str, **options) -> list[int]:
    return httpx.post(server.url + "/tokenize", json={"prompt": text, **options}).json()["tokens"]


@pytest.fixture(scope="module")
def sea(client) -> str:
    return complete(client).choices[0].text


@pytest.fixture(scope="module")
def hill(client) -> str:
    return complete(client, HILL).choices[0].text


def test_a_prompt_is_text_or_token_ids_or_lists_of_either(smol, client, sea, hill):
    assert sea != hill
    ids = [tokens(smol, text) for text in (SEA, HILL)]
    assert complete(client, ids[0]).choices[0].text == sea
    for both in ([SEA, HILL], ids, [SEA, ids[1]]):
        answer = complete(client, both)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, sea), (1, hill)]
        assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.usage.completion_tokens == 10


def test_choices_are_numbered_prompt_by_prompt(client):
    options = {"n": 2, "temperature": 2.0, "seed": 3}
    answer = complete(client, [SEA, HILL], **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for prompt, first in ((SEA, 0), (HILL, 2)):
        alone = complete(client, prompt, **options)
        together = answer.choices[first : first + 2]
        assert [choice.text for choice in alone.choices] == [choice.text for choice in together]
    assert len({choice.text for choice in answer.choices}) == 4


def test_streams_of_several_prompts_come_as_one(client, sea, hill):
    texts, ends = ["", ""], []
    for event in complete(client, [SEA, HILL], stream=True):
        (choice,) = event.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason == "length" else []
    assert texts == [sea, hill] and sorted(ends) == [0, 1]


def test_an_answer_has_sixteen_tokens_unless_told_otherwise(client):
    answer = complete(client, max_tokens=openai.omit, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.object, answer.id[:5]) == (16, "text_completion", "cmpl-")


def test_llama_cpps_name_for_the_number_of_tokens_has_no_limit_at_minus_one(client):
    for n_predict, num_tokens in ((3, 3), (-1, 512 - 470)):
        extra = {"ignore_eos": True, "n_predict": n_predict}
        answer = complete(client, [5] * 470, max_tokens=openai.omit, extra_body=extra)
        assert answer.usage.completion_tokens == num_tokens


def test_echo_begins_with_the_prompt(smol, client, sea):
    assert complete(client, echo=True).choices[0].text == SEA + sea
    assert complete(client, tokens(smol, SEA), echo=True).choices[0].text == SEA + sea
    assert "".join(event.choices[0].text for event in complete(client, echo=True, stream=True)) == SEA + sea


def test_logprobs_line_up_with_the_text(client, sea):
    columns = complete(client, logprobs=2).choices[0].logprobs
    assert "".join(columns.tokens) == sea
    rows = zip(columns.tokens, columns.token_logprobs, columns.text_offset, columns.top_logprobs)
    for token, logprob, offset, top in rows:
        assert sea[offset:].startswith(token)
        assert len(top) == 2 and top[token] == logprob == max(top.values())  # greedy
        assert sum(map(math.exp, top.values())) <= 1
    assert complete(client).choices[0].logprobs is None
    assert all(not top for top in complete(client, logprobs=0).choices[0].logprobs.top_logprobs)


def test_echoed_logprobs_agree_with_those_of_the_answer(client, sea):
    """The same tokens, once chosen one by one and once read as a prompt."""
    chosen = complete(client, logprobs=1).choices[0].logprobs
    echoed = complete(client, SEA + sea, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert echoed.token_logprobs[0] is None and echoed.tokens[3:8] == chosen.tokens
    assert echoed.token_logprobs[3:8] == pytest.approx(chosen.token_logprobs, abs=1e-3)
    assert echoed.text_offset[3:8] == [len(SEA) + offset for offset in chosen.text_offset]


def test_a_prompt_can_be_scored_without_an_answer(client):
    answer = complete(client, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == SEA and "".join(choice.logprobs.tokens) == SEA and len(choice.logprobs.token_logprobs) == 3
    assert answer.usage.completion_tokens == 0 and choice.finish_reason == "length"


def test_streamed_logprobs_are_those_of_the_whole(client):
    options = {"echo": True, "logprobs": 1, "n": 2}
    whole = complete(client, [SEA, HILL], **options)
    columns = {choice.index: ([], []) for choice in whole.choices}
    for event in complete(client, [SEA, HILL], stream=True, **options):
        (choice,) = event.choices
        columns[choice.index][0].extend(choice.logprobs.tokens)
        columns[choice.index][1].extend(choice.logprobs.text_offset)
    assert columns == {choice.index: (choice.logprobs.tokens, choice.logprobs.text_offset) for choice in whole.choices}


def test_characters_of_several_tokens_keep_offsets_right(client):
    """An emoji is several tokens: each starts where the character does."""
    columns = complete(client, "a🦆b", echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    assert columns.tokens[0] == "a" and columns.tokens[-1] == "b"
    assert columns.text_offset[1] == 1 and columns.text_offset[-1] == 2


def test_special_tokens_keep_offsets_right(smol, client):
    text = "<|im_start|>user\nhi<|im_end|>"
    for prompt in (text, tokens(smol, text)):
        columns = complete(client, prompt, echo=True, logprobs=0, max_tokens=1).choices[0].logprobs
        assert all(text[offset:].startswith(token) for token, offset in zip(columns.tokens[:-1], columns.text_offset))
        assert columns.text_offset[-1] == len(text)


def test_a_token_the_tokenizer_adds_takes_no_room_in_the_text(with_bos):
    tokenizer = Tokenizer.from_path(with_bos)
    ids = tokenizer.encode("sea hill")
    entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in ids[1:]]
    columns = CompletionLogprobsWriter(SamplingParams(logprobs=0), tokenizer, ids).echo("sea hill", entries)
    assert list(zip(columns.tokens, columns.text_offset))[:2] == [("<|im_start|>", 0), ("sea", 0)]


def test_token_ids_and_prompt_logprobs_are_returned_when_asked(smol, client, sea):
    body = {"return_token_ids": True, "prompt_logprobs": 1}
    (choice,) = complete(client, extra_body=body).choices
    assert choice.prompt_token_ids == tokens(smol, SEA)
    assert choice.token_ids == tokens(smol, sea)
    nothing, *entries = choice.prompt_logprobs
    assert nothing is None and [int(next(iter(entry))) for entry in entries] == choice.prompt_token_ids[1:]
    first, *events = complete(client, extra_body=body, stream=True)
    assert first.choices[0].prompt_token_ids == choice.prompt_token_ids
    assert [token for event in events for token in event.choices[0].token_ids] == choice.token_ids


def test_the_tokenizers_own_tokens_can_be_left_out(echo):
    client = echo.client()

    def prompt_ids(**extra) -> list[int]:
        return complete(client, extra_body={"return_token_ids": True, **extra}).choices[0].prompt_token_ids

    assert prompt_ids() == [1, *prompt_ids(add_special_tokens=False)]


def test_usage_of_a_stream_counts_all_prompts(client):
    *_, last = complete(client, [SEA, HILL], n=2, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens) == ([], 20, 12 // 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [[]]},
        {"prompt": [1, "a"]},
        {"prompt": {"a": 1}},
        {"prompt": [-1]},
        {"prompt": [10**6]},
        {"prompt": [10**30]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": None},
        {"prompt": ["a"] * 300},
        {"prompt": ["a"] * 100, "n": 3},
        {"prompt": list(range(600))},
        {"prompt": [-1], "echo": True},
        {"suffix": "end"},
        {"best_of": 3},
        {"logprobs": 1000},
        {"logprobs": True},
        {"logprobs": -1},
        {"max_tokens": 0},
        {"prompt_embeds": "AAAA"},
        {"response_format": {"type": "xml"}},
        {"guided_choice": []},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_what_cannot_be_served_is_refused(smol, fields):
    answer = httpx.post(smol.url + "/v1/completions", json={"prompt": SEA, "max_tokens": 1, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


def test_one_bad_prompt_among_many_refuses_all_and_leaves_nothing_running(echo):
    with pytest.raises(openai.BadRequestError):
        complete(echo.client(), [[5], [6], [10**6]], max_tokens=500)
