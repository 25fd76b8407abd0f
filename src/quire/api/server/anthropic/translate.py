"""Anthropic's bodies as the chat bodies that `chat.py` takes.

Called by `messages.py`. Knows both protocols' words for things; neither the engine nor how answers are written.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from quire import params as limits
from quire.api.server.anthropic.body import (
    Block,
    CountTokensRequest,
    CustomTool,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.api.server.chat import ChatRequest
from quire.api.server.fields import MAX_MESSAGE_VALUES
from quire.api.server.shape import Function, NamedFunction, NamedTool, Tool
from quire.errors import RequestError

# Some clients begin the system text with a block that is different in every request, which no prefix could be cached
# behind. It is for Anthropic's accounting.
ACCOUNTING = "x-anthropic-billing-header"

_CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}

Turn = tuple[str, list[Block]]  # role, what is said


def to_chat(body: CountTokensRequest, takes_late_system: bool) -> ChatRequest:
    """`takes_late_system`: whether the model's template takes system messages after the first turn."""
    if not body.messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    turns = _turns(body, takes_late_system)
    messages = list(_messages(turns))
    limits.check_json("messages", messages, MAX_MESSAGE_VALUES)
    chat = ChatRequest(
        messages=messages,
        model=body.model,
        continue_final_message=_is_begun(turns) or None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    _add_tools(chat, body.tools, body.tool_choice)
    _add_format(chat, body)
    _add_thinking(chat, body)
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences or None
        chat.stream = body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.cache_salt, chat.vllm_xargs = body.cache_salt, body.vllm_xargs
    return chat


# -- messages ----------------------------------------------------------------------------------------------------------


def _turns(body: CountTokensRequest, takes_late_system: bool) -> list[Turn]:
    """The system text and the messages, those of one role that follow each other as one.

    Where the template knows system messages only at the beginning, later ones become part of the user's."""
    system = _blocks(body.system or [])
    said: list[Turn] = [("system", system)] if system else []
    said += ((message.role, _content(idx, message)) for idx, message in enumerate(body.messages))
    turns: list[Turn] = []
    for role, blocks in said:
        if role == "system":
            blocks = [block for block in blocks if not _is_accounting(block)]
            if turns and turns[-1][0] != "system" and not takes_late_system:
                role = "user"
            if not blocks:
                continue
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _content(idx: int, message: InputMessage) -> list[Block]:
    blocks = _blocks(message.content)
    if not blocks:
        raise RequestError(f"message {idx} has no content", "messages")
    allowed: tuple[type, ...] = (TextBlock,)
    if message.role == "user":
        allowed = (TextBlock, ToolResultBlock)
    elif message.role == "assistant":
        allowed = (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)
    for block in blocks:
        if not isinstance(block, allowed):
            kind = type(block).__struct_config__.tag
            raise RequestError(f"message {idx} of role {message.role} cannot hold a block of type {kind}", "messages")
    return blocks


def _blocks(content: str | Sequence[Block]) -> list[Block]:
    return [TextBlock(content)] if isinstance(content, str) else list(content)


def _is_accounting(block: Block) -> bool:
    return isinstance(block, TextBlock) and block.text.startswith(ACCOUNTING)


def _messages(turns: list[Turn]) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}  # of the tools called so far, by the call's id
    for role, blocks in turns:
        if role == "assistant":
            names |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
            yield _answer(blocks)
        else:
            yield from _question(role, blocks, names)


def _question(role: str, blocks: list[Block], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A message of what tools returned for each result, and one of each text between them."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield _result(block, names)
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _result(block: ToolResultBlock, names: dict[str, str]) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    if block.is_error:  # templates have no other way to say so
        content = f"Error: {content}"
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if block.tool_use_id in names:
        message["name"] = names[block.tool_use_id]
    return message


def _answer(blocks: list[Block]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if any(thoughts):
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _is_begun(turns: list[Turn]) -> bool:
    """Whether the conversation ends with the beginning of the answer."""
    role, blocks = turns[-1] if turns else ("", [])
    if role == "assistant" and any(isinstance(block, ToolUseBlock) for block in blocks):
        raise RequestError("the last message calls a tool: send its result in a message of the user", "messages")
    return role == "assistant"


# -- options -----------------------------------------------------------------------------------------------------------


def _add_tools(chat: ChatRequest, tools: list[CustomTool] | None, choice: ToolChoice | None) -> None:
    if tools:
        chat.tools = [
            Tool(function=Function(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in tools
        ]
    if choice is None:
        return
    if choice.type != "tool":
        chat.tool_choice = _CHOICES[choice.type]
    elif choice.name:
        chat.tool_choice = NamedTool(NamedFunction(choice.name))
    else:
        raise RequestError("tool_choice of type tool needs the tool's name", "tool_choice")
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _add_format(chat: ChatRequest, body: CountTokensRequest) -> None:
    form = body.output_config.format if body.output_config is not None else None
    if form is not None and body.output_format is not None:
        raise RequestError("output_config.format and output_format exclude each other: give one", "output_format")
    form = form or body.output_format
    if form is None:
        return
    if body.tools and body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        text = f"an answer cannot be a call and have a format at once: leave tool_choice {body.tool_choice.type} out"
        raise RequestError(text, "tool_choice")
    chat.response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}


def _add_thinking(chat: ChatRequest, body: CountTokensRequest) -> None:
    chat.reasoning_effort = body.output_config.effort if body.output_config is not None else None
    asked = body.thinking
    if asked is None:
        return
    if asked.type == "disabled":
        chat.reasoning_effort = "none"
        chat.include_reasoning = False
    elif asked.type == "enabled":
        chat.chat_template_kwargs = {"enable_thinking": True, **(body.chat_template_kwargs or {})}
        chat.thinking_token_budget = asked.budget_tokens
        max_tokens = body.max_tokens if isinstance(body, MessagesRequest) else None
        if max_tokens is not None and asked.budget_tokens is not None and asked.budget_tokens >= max_tokens:
            raise RequestError("max_tokens must be greater than thinking.budget_tokens", "max_tokens")
