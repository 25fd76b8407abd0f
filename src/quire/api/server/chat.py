"""/v1/chat/completions: conversations in OpenAI's protocol, whole or as a stream.

Called by `app.py`. Messages are rendered and tokenized by the frontend; what they may hold is checked there.
"""

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.calls import Answer, Call
from quire.api.server.fields import (
    MAX_MESSAGE_VALUES,
    MAX_MESSAGES,
    MAX_TEMPLATE_VALUES,
    REFUSED,
    Count,
    Name,
    NumLogprobs,
    Refusals,
    Text,
    decode,
    given,
)
from quire.api.server.generation import Usage, built, finish, submit, text_of, usage
from quire.api.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from quire.api.server.reading import ChatMessage, ParsedEvents, Reading
from quire.api.server.shape import ChatFields, chat_constraint, parsers, shows_special_tokens
from quire.api.server.sse import EventFormat, Events, EventStream
from quire.errors import RequestError
from quire.frontend.async_llm import AsyncLLM, Stream
from quire.frontend.requests import ChoiceState
from quire.frontend.tokenizer import Tokenizer
from quire.params import MAX_TEXT_CHARS, free

_MESSAGE_SCHEMA = {
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string", "maxLength": MAX_TEXT_CHARS},
                {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}, "maxItems": MAX_MESSAGE_VALUES},
            ]
        },
    },
}
# Not structs: templates may know more keys than we do.
Message = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_MESSAGE_SCHEMA)]
Messages = Annotated[
    list[Message], free(MAX_MESSAGE_VALUES), msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})
]
TemplateArguments = Annotated[dict[str, Any], free(MAX_TEMPLATE_VALUES, maxProperties=MAX_TEMPLATE_VALUES)]


class TextPart(msgspec.Struct):
    """The one kind of part there is so far."""

    type: Literal["text"]
    text: Text


class PredictedPart(msgspec.Struct):
    text: Text
    type: Literal["text"] = "text"


class PredictedContent(msgspec.Struct):
    """What the answer may be like, such as the file that is to be edited: where it is right, answers are faster."""

    content: Text | Annotated[list[PredictedPart], msgspec.Meta(max_length=MAX_MESSAGES)]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(ChatFields, kw_only=True):
    messages: Messages
    prediction: PredictedContent | None = None
    add_generation_prompt: bool | None = None  # null: unless the final message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Name | None = None  # for templates that know it
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs set to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TemplateOptions(Protocol):
    """Fields of a body that say how its messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None


async def encode(
    llm: AsyncLLM, messages: list[dict[str, Any]], options: TemplateOptions, tools: list[dict[str, Any]] = []
) -> list[int]:
    """The token ids of the prompt that messages make."""
    continues = bool(options.continue_final_message)
    opens_answer = options.add_generation_prompt if options.add_generation_prompt is not None else not continues
    arguments = dict(options.chat_template_kwargs or {})
    if options.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", options.reasoning_effort)
    try:
        return await llm.encode_chat(messages, opens_answer, continues, arguments, tools)
    except RequestError as error:
        raise RequestError(str(error), "messages") from None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


TEMPLATE_REFUSED: Refusals = {
    # A template is a program: the operator chooses it, with --chat-template.
    "chat_template": given,
    "documents": given,
    "mm_processor_kwargs": given,
    "add_special_tokens": given,
}
CHAT_REFUSED: Refusals = {
    **REFUSED,
    **TEMPLATE_REFUSED,
    "functions": given,
    "function_call": lambda value: value not in (None, "none"),
    "audio": given,
    "modalities": lambda value: value not in (None, [], ["text"]),
    "verbosity": lambda value: value not in (None, "medium"),
    "web_search_options": lambda value: value is not None,
    "echo": given,
}


async def chat(call: Call) -> Answer | EventStream:
    body = await decode(call.body, ChatRequest, CHAT_REFUSED)
    llm = call.service.llm
    model_name = call.service.model_name(body.model)
    body.check(num_prompts=1)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.has_shape:  # reading a schema may take a while
        shape = await llm.off_loop(lambda: chat_constraint(body, llm.model))
    else:
        shape = chat_constraint(body, llm.model)
    params = body.params(
        llm.model, max_tokens=max_tokens, logprobs=body.num_logprobs(), structured_outputs=shape.structured
    )
    if shows_special_tokens(llm.model, shape.tools):
        params.skip_special_tokens = False
    prompt = await encode(llm, body.messages, body, shape.tools)
    predicted = body.prediction.text if body.prediction is not None else ""
    streams = await submit(call, [prompt], params, body, llm.model.reasoning_format is not None, predicted)
    reading = Reading(parsers(llm.model, shape.tools, prompt), body.include_reasoning is not False, shape.is_named)
    head: dict[str, Any] = {"id": f"chatcmpl-{call.request_id}", "created": call.created_s, "model": model_name}
    if body.stream:
        form = _format(head, body, streams[0], llm.model.tokenizer)
        if reading.is_plain:
            return EventStream(Events(form, streams, params.n), call)
        return EventStream(ParsedEvents(form, streams, params.n, reading), call)
    await finish(call, streams)
    return await built(call, lambda: _completion(head, body, streams[0], llm.model.tokenizer, reading))


def _completion(
    head: dict[str, Any], body: ChatRequest, stream: Stream, tokenizer: Tokenizer | None, reading: Reading
) -> ChatCompletion:
    request = stream.request

    def written(choice: ChoiceState) -> ChatChoice:
        message = reading.message(text_of(choice))
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=chat_logprobs(choice.logprobs, tokenizer) if body.logprobs else None,
            finish_reason=reading.finish_reason(choice.finish_reason, has_calls=message.tool_calls is not UNSET),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if body.return_token_ids else UNSET,
        )

    return ChatCompletion(
        **head,
        choices=[written(choice) for choice in request.choices],
        usage=usage([stream]),
        prompt_logprobs=prompt_logprobs(request.prompt_logprobs, tokenizer) if body.wants_prompt_logprobs else UNSET,
        prompt_token_ids=request.prompt_token_ids if body.return_token_ids else UNSET,
    )


def _format(head: dict[str, Any], body: ChatRequest, stream: Stream, tokenizer: Tokenizer | None) -> EventFormat:
    def opening(idx: int) -> tuple[dict[str, Any], dict[str, Any]]:
        beside: dict[str, Any] = {}
        if idx == 0 and body.return_token_ids:
            beside["prompt_token_ids"] = stream.request.prompt_token_ids
        if idx == 0 and body.wants_prompt_logprobs:
            beside["prompt_logprobs"] = prompt_logprobs(stream.request.prompt_logprobs, tokenizer)
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}, beside

    return EventFormat(
        head={"id": head["id"], "object": "chat.completion.chunk", "created": head["created"], "model": head["model"]},
        before_text=b'"delta":{"content":',
        after_text=b"}",
        opening=opening,
        slow_opening=body.wants_prompt_logprobs,
        logprobs=(lambda update: chat_logprobs(update.logprobs, tokenizer)) if body.logprobs else None,
        token_ids=bool(body.return_token_ids),
        usage_at_end=body.usage_at_end,
        usage_always=body.usage_always,
    )
