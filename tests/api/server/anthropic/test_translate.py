"""Anthropic's bodies as chat bodies: what each field and block becomes."""

import msgspec
import pytest

from quire.api.server.anthropic.body import CountTokensRequest, MessagesRequest
from quire.api.server.anthropic.translate import to_chat
from quire.api.server.chat import ChatRequest
from quire.errors import RequestError
from quire.frontend.chat import ChatTemplate

HELLO = {"role": "user", "content": "Hello"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}


def text(words: str) -> dict:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def call(call_id: str, **arguments) -> dict:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def result(call_id: str, content, **more) -> dict:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def chat(*messages: dict, takes_late_system: bool = True, **fields) -> ChatRequest:
    body = {"max_tokens": 100, "messages": list(messages or [HELLO]), **fields}
    return to_chat(msgspec.convert(body, MessagesRequest), takes_late_system)


def said(*messages: dict, **fields) -> list[tuple[str, str | None]]:
    return [(message["role"], message["content"]) for message in chat(*messages, **fields).messages]


def test_the_system_text_comes_first_as_text_or_as_blocks():
    assert said(system="Be brief.") == [("system", "Be brief."), ("user", "Hello")]
    assert said(system=[text("Be brief."), text("Be kind.")]) == [("system", "Be brief.\nBe kind."), ("user", "Hello")]
    assert said(system="") == said(system=[]) == [("user", "Hello")]


def test_what_is_only_for_accounting_is_no_part_of_the_prompt():
    blocks = [text("x-anthropic-billing-header: cc_version=2; cch=1a2b3;"), text("Be brief.")]
    assert said(system=blocks) == [("system", "Be brief."), ("user", "Hello")]


def test_messages_of_one_role_that_follow_each_other_are_one():
    messages = [HELLO, {"role": "user", "content": [text("you"), text("there")]}]
    assert said(*messages) == [("user", "Hello\nyou\nthere")]


def test_a_later_system_message_stays_where_it_is_if_the_template_takes_it_there():
    messages = [HELLO, {"role": "assistant", "content": "Hi"}, {"role": "system", "content": "Be brief."}, HELLO]
    kept = said(*messages)
    assert kept == [("user", "Hello"), ("assistant", "Hi"), ("system", "Be brief."), ("user", "Hello")]
    moved = said(*messages, takes_late_system=False)
    assert moved == [("user", "Hello"), ("assistant", "Hi"), ("user", "Be brief.\nHello")]
    first = [{"role": "system", "content": "Be kind."}, HELLO]
    assert said(*first, system="Be brief.", takes_late_system=False)[0] == ("system", "Be brief.\nBe kind.")


def test_which_templates_take_later_system_messages_is_found_out():
    every = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    first_only = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    )
    refusing = every + "{% if messages[2].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    taken = [ChatTemplate(source).takes_late_system for source in (every, first_only, refusing, None)]
    assert taken == [True, False, False, False]


def test_calls_and_their_results_become_messages_of_their_own():
    asked = {"role": "assistant", "content": [text("I add."), call("toolu_1", a=1), call("toolu_2", a=2)]}
    returned = {"role": "user", "content": [result("toolu_1", "3"), result("toolu_2", [text("4")]), text("Go on.")]}
    messages = chat(HELLO, asked, returned, tools=[ADD]).messages
    function = {"name": "add", "arguments": {"a": 1}}
    assert messages[1]["content"] == "I add."
    assert messages[1]["tool_calls"][0] == {"id": "toolu_1", "type": "function", "function": function}
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "add", "content": "4"},
        {"role": "user", "content": "Go on."},
    ]


def test_the_model_is_told_that_a_tool_failed():
    asked = {"role": "assistant", "content": [call("toolu_1")]}
    messages = chat(HELLO, asked, {"role": "user", "content": [result("toolu_1", "no disk", is_error=True)]}).messages
    assert messages[1]["content"] is None and messages[2]["content"] == "Error: no disk"


def test_a_tool_may_return_nothing():
    asked = {"role": "assistant", "content": [call("toolu_1")]}
    messages = chat(HELLO, asked, {"role": "user", "content": [result("toolu_1", None)]}).messages
    assert messages[2]["content"] == ""


def test_thinking_that_is_sent_back_is_the_answers_reasoning():
    thinking = {"type": "thinking", "thinking": "Two and two.", "signature": "any"}
    answer = {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, text("Four.")]}
    message = chat(HELLO, answer, HELLO).messages[1]
    assert message == {"role": "assistant", "content": "Four.", "reasoning": "Two and two."}


def test_a_final_message_of_the_assistant_is_continued():
    assert chat(HELLO, {"role": "assistant", "content": "It is ("}).continue_final_message is True
    assert chat(HELLO).continue_final_message is None


@pytest.mark.parametrize(
    ("choice", "becomes"),
    [("auto", "auto"), ("any", "required"), ("none", "none")],
)
def test_a_choice_of_tools_has_another_name(choice, becomes):
    assert chat(tools=[ADD], tool_choice={"type": choice}).tool_choice == becomes


def test_a_tool_can_be_named_and_calls_be_one_at_a_time():
    asked = chat(tools=[ADD], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert asked.tool_choice.function.name == "add" and asked.parallel_tool_calls is False
    assert chat(tools=[ADD]).tool_choice is None and chat(tools=[ADD]).parallel_tool_calls is None
    (tool,) = asked.tools
    assert (tool.function.name, tool.function.description, tool.function.parameters) == (
        "add",
        "Adds.",
        {"type": "object"},
    )


def test_a_format_is_a_response_format_by_either_name():
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "integer"}}}
    assert chat(output_config={"format": form}).response_format == chat(output_format=form).response_format == wanted


def test_thinking_can_be_asked_for_limited_and_turned_off():
    enabled = chat(thinking={"type": "enabled", "budget_tokens": 64})
    assert enabled.thinking_token_budget == 64 and enabled.chat_template_kwargs == {"enable_thinking": True}
    disabled = chat(thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert disabled.reasoning_effort == "none" and disabled.include_reasoning is False
    adaptive = chat(thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert adaptive.reasoning_effort == "high" and adaptive.thinking_token_budget is None
    own = chat(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False})
    assert own.chat_template_kwargs == {"enable_thinking": False}


def test_sampling_is_passed_on():
    asked = chat(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], cache_salt="s", vllm_xargs={"a": 1})
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop) == (0.5, 0.9, 7, ["END"])
    assert (asked.cache_salt, asked.vllm_xargs, asked.max_tokens) == ("s", {"a": 1}, 100)


@pytest.mark.parametrize(
    ("messages", "fields", "says"),
    [
        ([{"role": "user", "content": []}], {}, "message 0 has no content"),
        ([{"role": "user", "content": [call("1")]}], {}, "cannot hold a block of type tool_use"),
        ([HELLO, {"role": "assistant", "content": [result("1", "")]}], {}, "cannot hold a block of type tool_result"),
        ([HELLO, {"role": "assistant", "content": [call("1")]}], {}, "send its result"),
        ([HELLO], {"tool_choice": {"type": "tool"}}, "needs the tool's name"),
        ([HELLO], {"thinking": {"type": "enabled", "budget_tokens": 100}}, "max_tokens must be greater"),
        (
            [HELLO],
            {"output_config": {"format": {"schema": {}}}, "tools": [ADD], "tool_choice": {"type": "any"}},
            "cannot be a call and have a format",
        ),
        ([HELLO], {"output_config": {"format": {"schema": {}}}, "output_format": {"schema": {}}}, "exclude each other"),
        ([{"role": "user", "content": [text("x")] * 9000}, HELLO] * 4, {}, ""),
    ],
)
def test_what_makes_no_sense_is_refused(messages, fields, says):
    if says:
        with pytest.raises(RequestError, match=says):
            chat(*messages, **fields)
    else:  # many blocks are one text
        assert len(said(*messages, **fields)) == 1


def test_messages_hold_as_many_values_as_in_other_protocols():
    many = [{"role": role, "content": "x"} for _ in range(1900) for role in ("user", "assistant")]
    assert len(chat(*many, HELLO).messages) == 3801
    arguments = {f"a{idx}": idx for idx in range(10_000)}
    deep = [{"role": "assistant", "content": [call(f"{idx}", **arguments)]} for idx in range(2)]
    with pytest.raises(RequestError, match="more than 32768 values"):
        chat(HELLO, deep[0], HELLO, deep[1], HELLO)


def test_counting_takes_the_same_conversation():
    body = {"messages": [HELLO], "system": "Be brief.", "tools": [ADD]}
    counted = to_chat(msgspec.convert(body, CountTokensRequest), True)
    assert counted.messages == chat(system="Be brief.", tools=[ADD]).messages
