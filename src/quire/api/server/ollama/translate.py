"""Ollama's bodies as the bodies that `chat.py` and `completions.py` take.

Called by `generate.py`. Knows both protocols' words for things; neither the engine nor how answers are written.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from quire import params as limits
from quire.api.server.chat import ChatRequest
from quire.api.server.completions import CompletionRequest
from quire.api.server.fields import MAX_MESSAGE_VALUES
from quire.api.server.ollama.body import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaFields,
    OllamaMessage,
    OllamaOptions,
)
from quire.errors import RequestError

_OFF = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}  # options that are not supported, and what turns them off
_SAME = "temperature top_p top_k min_p presence_penalty frequency_penalty repeat_penalty".split()


def to_chat(body: OllamaChatRequest | GenerateRequest, max_model_len: int, thinks: bool) -> ChatRequest:
    """`thinks`: whether the model does."""
    if isinstance(body, OllamaChatRequest):
        said = body.messages or []
    else:
        system = [OllamaMessage("system", body.system)] if body.system else []
        said = [*system, OllamaMessage("user", body.prompt)]
    messages = list(_messages(said))
    limits.check_json("messages", messages, MAX_MESSAGE_VALUES)
    chat = ChatRequest(
        messages=messages,
        continue_final_message=_is_begun(said) or None,
        tools=(body.tools or None) if isinstance(body, OllamaChatRequest) else None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **_shared(body, max_model_len),
    )
    _add_thinking(chat, body, thinks)
    return chat


def to_completion(body: GenerateRequest, max_model_len: int) -> CompletionRequest:
    if body.system:
        raise RequestError("system needs the template, which raw leaves out: put it into the prompt", "system")
    if body.think:
        raise RequestError("think needs the template, which raw leaves out: leave one of the two out", "think")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs set to true", "top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionRequest(prompt=body.prompt or "", logprobs=num_logprobs, **_shared(body, max_model_len))


def _shared(body: OllamaFields, max_model_len: int) -> dict[str, Any]:
    """Fields of chat and completions alike."""
    options = body.options or OllamaOptions()
    for name, off in _OFF.items():
        if getattr(options, name) not in (None, off):
            raise RequestError(f"the option {name} is not supported by this server: leave it out", "options")
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        message = f"num_ctx is {options.num_ctx}, and this server's context has {max_model_len} tokens: lower it"
        raise RequestError(message, "options")
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
    fields["seed"] = options.seed if options.seed != -1 else None
    fields["stop"] = options.stop or None
    fields["n_predict"] = max(options.num_predict or 0, 0) or -1
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["json_schema"] = body.format
    return fields


def _add_thinking(chat: ChatRequest, body: OllamaFields, thinks: bool) -> None:
    if body.think and not thinks:
        raise RequestError("this model does not think: leave think out", "think")
    if body.think is False:
        chat.reasoning_effort = "none"
        chat.include_reasoning = False
    elif body.think is True:
        chat.chat_template_kwargs = {"enable_thinking": True}
    elif body.think:
        chat.reasoning_effort = body.think


def _is_begun(messages: Sequence[OllamaMessage]) -> bool:
    """Whether the conversation ends with the beginning of the answer."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _messages(said: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    open_calls: list[tuple[str, str]] = []  # id and name of those whose results have not come yet
    num_calls = 0
    for message in said:
        if message.images:
            raise RequestError("images are not supported by this server: leave them out", "messages")
        written: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            written["reasoning"] = message.thinking
        if message.tool_calls:
            open_calls = []
            for call in message.tool_calls:
                num_calls += 1
                # Clients send no ids. Some templates want them, and some want them to have nine letters and digits.
                open_calls.append((call.id or f"call{num_calls:05}", call.function.name))
            written["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": call.function.arguments}}
                for (call_id, name), call in zip(open_calls, message.tool_calls)
            ]
        if message.role == "tool":
            written |= _answered(message, open_calls)
        yield written


def _answered(message: OllamaMessage, open_calls: list[tuple[str, str]]) -> dict[str, str]:
    """Which call a result is of: the one it names, else the first of its tool, else the first of all."""
    tests = [
        lambda call: call[0] == message.tool_call_id,
        lambda call: call[1] == message.tool_name,
        lambda call: message.tool_call_id is None and message.tool_name is None,
    ]
    found = next((call for test in tests for call in open_calls if test(call)), None)
    if found is not None:
        open_calls.remove(found)
    call_id, name = found or (message.tool_call_id, message.tool_name)
    return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value is not None}
