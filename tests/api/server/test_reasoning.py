"""Thinking told from answers, through the real `openai` client: SmolLM2 with a template that can open the thinking.

SmolLM2 was not trained to think. Where the prompt opens the thinking, all it writes up to the closing tag is thinking;
where the model must open it itself, a pattern forces it to.
"""

import json
from collections.abc import Iterator

import jsonschema_rs
import openai
import pytest

from tests.serving import ServerProcess

# ChatML; "<think>\n" ends the prompt unless enable_thinking is false, as DeepSeek R1 has it.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call these tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}"""
QUESTION = [{"role": "user", "content": "What is two plus two?"}]
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["°", "€"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
IN_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": ANSWER}}
LONG = {"min_tokens": 30}  # it must not end when its thinking does
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[ServerProcess]:
    """Without prefix cache, so that the same question alone is computed the same way twice."""
    flags = "--max-model-len 512 --num-threads 1 --kv-cache-memory-bytes 64M --no-enable-prefix-caching".split()
    formats = ["--reasoning-parser", "think", "--tool-call-parser", "hermes", "--chat-template", TEMPLATE]
    with ServerProcess("smollm2", *flags, *formats) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, extra: dict | None = None, **options):
    """Greedy; `extra` are fields the client does not know."""
    body = {"return_token_ids": True, **(extra or {})}
    known = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 40, **options}
    return client.chat.completions.create(**known, extra_body=body)


def parts(message) -> tuple[str | None, str | None]:
    thoughts = getattr(message, "reasoning_content", None)
    assert getattr(message, "reasoning", None) == thoughts
    return thoughts, message.content


def streamed(events) -> tuple[str | None, str | None]:
    """Thinking and content of a stream; no event has both, and content never comes before thinking ends."""
    thoughts, content = None, None
    for event in events:
        thought, text = parts(event.choices[0].delta)
        assert thought is None or text is None
        if thought is not None:
            assert content is None
            thoughts = (thoughts or "") + thought
        if text is not None:
            content = (content or "") + text
    return thoughts, content


def test_thinking_that_the_prompt_opened_is_no_content(client):
    answer = ask(client, max_tokens=12)
    thoughts, content = parts(answer.choices[0].message)
    assert thoughts and content == "" and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == answer.usage.completion_tokens_details.reasoning_tokens == 12


def test_a_budget_closes_the_thinking_after_that_many_tokens(server, client):
    end = server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    free = ask(client, LONG).choices[0].token_ids
    for budget in (0, 1, 7):
        answer = ask(client, {**LONG, "thinking_token_budget": budget})
        ids = answer.choices[0].token_ids
        assert ids[: budget + len(end)] == free[:budget] + end
        thoughts, content = parts(answer.choices[0].message)
        assert content and "think>" not in content and bool(thoughts) == (budget > 1)
        assert answer.usage.completion_tokens == len(ids)


def test_tokens_of_thinking_are_counted_alike_in_streams_and_whole_answers(server, client):
    end = server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    extra = {**LONG, "thinking_token_budget": 8}
    whole = ask(client, extra).usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    *_, before, last = [event.usage for event in ask(client, extra, stream=True, stream_options=options)]
    assert whole.completion_tokens_details == last.completion_tokens_details == before.completion_tokens_details
    assert 8 <= whole.completion_tokens_details.reasoning_tokens <= 8 + len(end) + 2 < whole.completion_tokens
    assert ask(client, UNTHINKING).usage.completion_tokens_details.reasoning_tokens == 0


def test_minus_one_is_no_budget(client):
    free, none = ask(client, max_tokens=20), ask(client, {"thinking_token_budget": -1}, max_tokens=20)
    assert free.choices[0].token_ids == none.choices[0].token_ids


def test_without_a_budget_in_reach_nothing_changes(client):
    budgeted, free = ask(client, {"thinking_token_budget": 500}, max_tokens=20), ask(client, max_tokens=20)
    assert budgeted.choices[0].token_ids == free.choices[0].token_ids


def test_a_template_switch_turns_thinking_off(client):
    for extra in (UNTHINKING, {**UNTHINKING, "thinking_token_budget": 3}):
        thoughts, content = parts(ask(client, extra, max_tokens=12).choices[0].message)
        assert thoughts is None and content.startswith("Two plus two")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_the_model_opens_is_told_from_the_answer(client, stream):
    pattern = "<think>\n[a-z ]{8,16}\n</think>\n\n[0-9]{2,4} <think>"
    answer = ask(client, {**UNTHINKING, "guided_regex": pattern}, stream=stream)
    thoughts, content = streamed(answer) if stream else parts(answer.choices[0].message)
    assert thoughts.strip() == thoughts and 6 < len(thoughts) <= 16
    assert content[:2].isdigit() and content.endswith(" <think>")  # further on the tag is only text


EXTRAS = {
    "free": LONG,
    "ended early": {"stop": ["</think>"]},
    "schema": {"response_format": IN_FORMAT},
    "unthinking": UNTHINKING,
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_a_stream_put_together_is_the_whole_answer(client, extra):
    extra = {"thinking_token_budget": 8, **extra}
    (choice,) = ask(client, extra).choices
    events = list(ask(client, extra, stream=True))
    assert streamed(events) == parts(choice.message)
    assert events[-1].choices[0].finish_reason == choice.finish_reason
    assert [token for event in events for token in getattr(event.choices[0], "token_ids", [])] == choice.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_can_be_left_out(client, stream):
    shown = {**LONG, "thinking_token_budget": 8}
    extra = {**shown, "include_reasoning": False}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask(client, extra, stream=stream, **options)
    if stream:
        *answer, last = answer
    thoughts, content = streamed(answer) if stream else parts(answer.choices[0].message)
    assert thoughts is None and content == parts(ask(client, shown).choices[0].message)[1]
    assert (last if stream else answer).usage.completion_tokens >= 30  # what is not shown was computed


def test_thinking_is_free_and_the_answer_has_its_format(client):
    options = {"response_format": IN_FORMAT, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 90}
    answer = ask(client, {"thinking_token_budget": 10}, **options)
    for choice in answer.choices:
        thoughts, content = parts(choice.message)
        assert choice.finish_reason == "stop" and jsonschema_rs.is_valid(ANSWER, json.loads(content))
        with pytest.raises(json.JSONDecodeError):
            json.loads(thoughts)


def test_without_thinking_the_format_holds_from_the_beginning(client):
    thoughts, content = parts(ask(client, UNTHINKING, response_format=IN_FORMAT).choices[0].message)
    assert thoughts is None and jsonschema_rs.is_valid(ANSWER, json.loads(content))


def test_an_answer_cut_while_it_thinks_has_no_content(client):
    (choice,) = ask(client, response_format=IN_FORMAT, max_tokens=10).choices
    assert choice.finish_reason == "length" and parts(choice.message)[1] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_after_thinking(client, stream):
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    answer = ask(client, {"thinking_token_budget": 6}, **options, stream=stream)
    if stream:
        events = list(answer)
        thoughts, content = streamed(events)
        calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
        arguments = "".join(call.function.arguments for call in calls)
        end = events[-1].choices[0].finish_reason
    else:
        (choice,) = answer.choices
        thoughts, content = parts(choice.message)
        (arguments,) = [call.function.arguments for call in choice.message.tool_calls]
        end = choice.finish_reason
    assert thoughts and content is None and end == "tool_calls"
    assert jsonschema_rs.is_valid(ANSWER, json.loads(arguments))


def test_logprobs_cover_thinking_too(client):
    (choice,) = ask(client, {"thinking_token_budget": 5}, logprobs=True, max_tokens=20).choices
    assert len(choice.logprobs.content) == len(choice.token_ids)
    events = ask(client, {"thinking_token_budget": 5}, logprobs=True, max_tokens=20, stream=True)
    entries = [entry for event in events if event.choices[0].logprobs for entry in event.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]


@pytest.mark.parametrize("budget", [-2, "much", 1.5])
def test_a_wrong_budget_is_refused(server, budget):
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "thinking_token_budget": budget})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
