"""Ollama's bodies as chat bodies: messages, calls and their results, options."""

import msgspec
import pytest

from quire.api.server.ollama.body import GenerateRequest, OllamaChatRequest
from quire.api.server.ollama.translate import to_chat, to_completion
from quire.errors import RequestError

CALLS = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "sub", "arguments": {}}}]


def chat(*messages, **fields):
    body = msgspec.convert({"messages": list(messages), **fields}, OllamaChatRequest)
    return to_chat(body, max_model_len=512, thinks=True)


def calling(*calls) -> dict:
    return {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": list(calls)}


def result(content: str, **fields) -> dict:
    return {"role": "tool", "content": content, **fields}


def test_calls_get_ids_and_results_those_of_their_calls():
    asked = chat(calling(*CALLS), result("-1", tool_name="sub"), result("2", tool_name="add"))
    call_message, second, first = asked.messages
    ids = [call["id"] for call in call_message["tool_calls"]]
    assert ids == ["call00001", "call00002"] and call_message["reasoning"] == "Hm."
    assert call_message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (second["tool_call_id"], second["name"]) == (ids[1], "sub")
    assert (first["tool_call_id"], first["name"]) == (ids[0], "add")


def test_results_without_a_name_come_in_the_order_of_the_calls():
    found = chat(calling(*CALLS), result("2"), result("-1"), calling(CALLS[0]), result("3")).messages
    assert [message.get("name") for message in found] == [None, "add", "sub", None, "add"]
    assert found[4]["tool_call_id"] == "call00003"


def test_ids_that_clients_send_are_kept():
    found = chat(calling({**CALLS[0], "id": "x1"}), result("2", tool_call_id="x1")).messages
    assert found[0]["tool_calls"][0]["id"] == found[1]["tool_call_id"] == "x1" and found[1]["name"] == "add"


def test_a_result_of_no_call_keeps_what_it_says():
    (message,) = chat(result("2", tool_name="other")).messages
    assert message == {"role": "tool", "content": "2", "name": "other"}


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({}, "n_predict", -1),
        ({"num_predict": -1}, "n_predict", -1),
        ({"num_predict": -2}, "n_predict", -1),
        ({"num_predict": 0}, "n_predict", -1),
        ({"num_predict": 7}, "n_predict", 7),
        ({"seed": -1}, "seed", None),
        ({"seed": 0}, "seed", 0),
        ({"stop": []}, "stop", None),
        ({"num_ctx": 512}, "n_predict", -1),
        ({"mirostat": 0, "tfs_z": 1.0, "typical_p": 1}, "n_predict", -1),
        ({"num_gpu": 1, "whatever": {}}, "n_predict", -1),
    ],
)
def test_options_become_fields(options, field, value):
    asked = {"role": "user", "content": "a"}
    assert getattr(chat(asked, options=options), field) == value
    raw = msgspec.convert({"prompt": "a", "options": options}, GenerateRequest)
    assert getattr(to_completion(raw, max_model_len=512), field) == value


def test_thinking_is_asked_for_in_the_words_of_templates():
    asked = {"role": "user", "content": "a"}
    assert chat(asked).reasoning_effort is None
    assert chat(asked, think=True).chat_template_kwargs == {"enable_thinking": True}
    off = chat(asked, think=False)
    assert off.reasoning_effort == "none" and off.include_reasoning is False
    assert chat(asked, think="high").reasoning_effort == "high"


def test_messages_hold_a_bounded_number_of_values():
    many = {"function": {"name": "f", "arguments": {f"k{idx}": idx for idx in range(2000)}}}
    with pytest.raises(RequestError, match="values"):
        chat(calling(*[many] * 9))
