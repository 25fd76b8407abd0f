"""Agents: programs that have the model call tools, send back what they returned, and ask again, many times."""

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest
from anthropic import beta_tool

from tests.scripted import script
from tests.serving import ServerProcess

TEMPLATE = Path(__file__).parents[3] / "data/templates/Qwen-Qwen2.5-7B-Instruct.jinja"
TIME = {
    "name": "get_time",
    "description": "The time in a zone.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
READ = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return str(a + b)


def test_the_clients_own_loop_runs_until_there_is_no_call(client):
    answers = (call("add", a=2, b=3), call("add", a=5, b=8), "It is {last}.")
    options = {"model": "smol", "max_tokens": 300, "system": script(*answers), "tools": [add]}
    runner = client.beta.messages.tool_runner(**options, messages=[{"role": "user", "content": "Add."}])
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use", "end_turn"]
    assert messages[-1].content[0].text == "It is 13."


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_twenty_turns(client, streams):
    """Each turn thinks, says something and calls; what is sent back keeps what was cached."""
    turns = 20
    answers = [
        f"<think>\nFile {idx} comes next.\n</think>\n\nReading file {idx}.\n{call('read', path=f'/src/{idx}.py')}"
        for idx in range(turns - 1)
    ]
    answers.append("I have read them all: {last}.")
    cached = {"cache_control": {"type": "ephemeral"}}
    options = {
        "model": "smol",
        "max_tokens": 32_000,
        "system": [{"type": "text", "text": script(*answers), **cached}],
        "tools": [{**READ, **cached}],
        "metadata": {"user_id": "an agent"},
    }
    messages: list = [{"role": "user", "content": [{"type": "text", "text": "Read all files.", **cached}]}]
    usages = []
    for turn in range(turns):
        if streams:
            with client.messages.stream(**options, messages=messages) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options, messages=messages)
        usages.append(message.usage)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        assert message.stop_reason == "tool_use" and [block.input for block in calls] == [{"path": f"/src/{turn}.py"}]
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": f"content {turn}"} for block in calls]
        messages.append({"role": "user", "content": results})
    assert turn == turns - 1 and message.stop_reason == "end_turn"
    assert message.content[0].text == f"I have read them all: content {turns - 2}."
    for before, usage in zip(usages, usages[1:]):  # what was cached of the turn before is read again
        assert usage.cache_read_input_tokens >= before.cache_read_input_tokens + before.input_tokens - 2 * 16


@pytest.fixture(scope="module")
def model(smollm2) -> Iterator[ServerProcess]:
    """The real model, with a template for tools."""
    flags = ["--max-model-len", "1024", "--num-threads", "1", "--kv-cache-memory-bytes", "128M"]
    with ServerProcess("smollm2", *flags, "--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE)) as process:
        yield process
        assert process.stop() == 0


@pytest.mark.parametrize("streams", [False, True])
def test_three_turns_of_a_real_model_with_tools(model, streams):
    client = anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0, timeout=60)
    messages: list = [{"role": "user", "content": "What time is it in UTC, and in CET?"}]
    options = {"model": "smollm2", "max_tokens": 100, "tools": [TIME], "extra_body": {"temperature": 0}}
    one_call = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (one_call, {"type": "tool", "name": "get_time"}, {"type": "none"}):
        if streams:
            with client.messages.stream(**options, messages=messages, tool_choice=choice) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options, messages=messages, tool_choice=choice)
        messages.append({"role": "assistant", "content": message.content})
        if choice["type"] != "none":
            (block,) = message.content
            assert message.stop_reason == "tool_use" and block.input["zone"] in ("UTC", "CET")
            result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "12:00"}]}
            messages.append({"role": "user", "content": [result]})
    assert message.content[0].type == "text" and message.stop_reason in ("end_turn", "max_tokens")
