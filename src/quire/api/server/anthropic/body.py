"""Bodies of Anthropic's protocol: what messages, tools and options may hold.

Decoded by `messages.py`, read by `translate.py`. Like all bodies they declare how much each field may hold
(`fields.py`). Keys of blocks that are not declared here, such as cache_control, are ignored.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from quire import params as limits
from quire.api.server.fields import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGE_VALUES,
    MAX_MESSAGES,
    ExtraArguments,
    Name,
    NonEmpty,
    Refusals,
    RequestBody,
    Text,
    at_most,
    given,
    text,
    whole,
    within,
)
from quire.api.server.prompts import TEMPLATE_REFUSED, TemplateArguments
from quire.api.server.shape import MAX_TOOLS
from quire.params import GrammarObject, free

# Accepted and without effect: they describe the client, or tune what only Anthropic's own servers have.
CLIENT_FIELDS = frozenset(
    """metadata service_tier cache_control context_management inference_geo diagnostics speed betas user_profile_id
    mm_payload return_mm_kwargs""".split()
)
REFUSED: Refusals = {
    **TEMPLATE_REFUSED,
    "mcp_servers": given,
    "container": given,
    "thread": given,  # a conversation that the server keeps
    "watermarking": given,
    "kv_transfer_params": given,
    "ec_transfer_params": given,
}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: Text


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """An earlier answer's thinking, sent back."""

    thinking: Text
    signature: Text = ""  # not checked


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking that another server has encrypted: it is left out."""

    data: Text = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: Name
    name: Name
    input: Annotated[dict[str, Any], free(MAX_MESSAGE_VALUES, maxProperties=MAX_MESSAGE_VALUES)] = {}


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], at_most(MAX_MESSAGE_VALUES)] | None = None
    is_error: bool | None = None  # the model is told so


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], at_most(MAX_MESSAGE_VALUES)]


class CustomTool(msgspec.Struct):
    """A tool that the client runs; there are no others here."""

    name: Name
    input_schema: GrammarObject  # of its arguments
    description: Text | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None  # with the type tool
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, whole(1, limits.LARGEST_INT)] | None = None  # less than max_tokens
    display: Literal["summarized", "omitted", "updates"] | None = None  # omitted: blocks of thinking are empty


class JsonFormat(msgspec.Struct):
    schema: GrammarObject
    type: Literal["json_schema"] = "json_schema"


class OutputOptions(msgspec.Struct):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # for templates that know reasoning_effort


InputMessages = Annotated[list[InputMessage], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]


class CountTokensRequest(RequestBody, kw_only=True):
    """A conversation in Anthropic's form."""

    no_effect: ClassVar[frozenset[str]] = CLIENT_FIELDS
    refused: ClassVar[Refusals] = REFUSED

    messages: InputMessages
    model: Name | None = None
    system: Text | Annotated[list[TextBlock], at_most(MAX_MESSAGES)] | None = None
    tools: Annotated[list[CustomTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None  # null: as the model does by itself
    output_config: OutputOptions | None = None
    output_format: JsonFormat | None = None  # older name of output_config.format
    chat_template_kwargs: TemplateArguments | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A conversation in Anthropic's form, and how it is to be answered."""

    max_tokens: Annotated[int, whole(1, limits.LARGEST_INT)]  # fewer where the context ends before
    stop_sequences: Annotated[list[NonEmpty], at_most(limits.MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, within(0, limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, within(0, 1, exclusiveMinimum=0)] | None = None
    top_k: Annotated[int, whole(-1, limits.LARGEST_INT)] | None = None
    cache_salt: Annotated[str, text(MAX_CACHE_SALT_CHARS)] | None = None
    vllm_xargs: ExtraArguments | None = None  # for the operator's logits processors
