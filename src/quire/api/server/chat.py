"""/v1/chat/completions: conversations in OpenAI's protocol, whole or as a stream.

Called by `app.py`. Messages are rendered and tokenized by the frontend; what they may hold is checked there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.calls import Answer, Call
from quire.api.server.fields import (
    MAX_MESSAGES,
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
from quire.api.server.prompts import (
    TEMPLATE_REFUSED,
    Documents,
    Messages,
    TemplateArguments,
    check_room,
    cut,
    encode_messages,
)
from quire.api.server.reading import ChatMessage, ParsedEvents, Reading, thinking_counter
from quire.api.server.shape import AnswerShape, ChatFields, chat_constraint, parsers, shows_special_tokens
from quire.api.server.sse import ChoiceEvents, EventFormat, EventStream
from quire.config import ServingConfig
from quire.errors import RequestError
from quire.frontend.async_llm import Stream
from quire.frontend.requests import ChoiceState, ChoiceUpdate
from quire.frontend.tokenizer import Tokenizer
from quire.params import ALL, SamplingParams


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
    refused: ClassVar[Refusals] = {
        **ChatFields.refused,
        **TEMPLATE_REFUSED,
        "functions": given,
        "function_call": lambda value: value not in (None, "none"),
        "audio": given,
        "modalities": lambda value: value not in (None, [], ["text"]),
        "verbosity": lambda value: value not in (None, "medium"),
        "web_search_options": lambda value: value is not None,
    }

    twins: ClassVar[tuple[tuple[str, str], ...]] = (*ChatFields.twins, ("n_predict", "max_completion_tokens"))

    messages: Messages
    prediction: PredictedContent | None = None
    add_generation_prompt: bool | None = None  # null: unless the final message is continued
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # the tokenizer's own, beside those of the template
    chat_template_kwargs: TemplateArguments | None = None
    documents: Documents | None = None  # for templates that know them
    reasoning_effort: Name | None = None  # for templates that know it
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None  # at most --max-logprobs of the server
    echo: bool | None = None  # the answer begins with the final message, if that is the assistant's
    return_prompt_text: bool | None = None  # what the prompt's token ids spell, as prompt_text

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else super().asked_tokens

    def num_logprobs(self, serving: ServingConfig) -> int | None:
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise RequestError(f"{name} needs logprobs set to true", name)
        asked, limit = self.top_logprobs, serving.max_logprobs
        if asked is not None and limit != ALL and not 0 <= asked <= limit:
            raise RequestError(f"top_logprobs must be at least 0 and at most {limit}, not {asked}", "top_logprobs")
        if not self.logprobs or self.logprob_token_ids:  # the number of these is the number of logprobs
            return None
        return asked or 0

    def echoed(self) -> str:
        """What the answer begins with."""
        last = self.messages[-1] if self.echo else {}
        content = last.get("content") if last.get("role") == "assistant" else ""
        if isinstance(content, list):  # of text parts: the frontend has checked it
            content = "\n".join(part["text"] for part in content)
        return content or ""


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
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, checked and tokenized."""

    token_ids: list[int]
    text: str | None  # where it was asked for
    params: SamplingParams
    shape: AnswerShape


@dataclass(frozen=True)
class Conversation:
    """A conversation whose answers are under way."""

    model_name: str
    prompt: ChatPrompt
    stream: Stream
    reading: Reading
    num_thinking: Callable[[], int] | None  # tokens of thinking so far; None: the model does not think


async def chat(call: Call) -> Answer | EventStream:
    body = await decode(call.body, ChatRequest)
    chat = await start(call, body)
    answer = _Writer(call, body, chat)
    if body.stream:
        form, streams, n = answer.event_format(), [chat.stream], chat.prompt.params.n
        if chat.reading.is_plain:
            return EventStream(ChoiceEvents(form, streams, n), call)
        return EventStream(ParsedEvents(form, streams, n, chat.reading), call)
    await finish(call, [chat.stream])
    return await built(call, answer.completion)


async def start(call: Call, body: ChatRequest, cuts_answer: bool = False) -> Conversation:
    """Asks the engine; RequestError says what is wrong with the body. `cuts_answer`: where the context has no room for
    all the tokens that were asked for, the answer is shorter; else the body is refused."""
    model = call.service.llm.model
    model_name = call.service.model_name(body.model)
    call.own_id = body.request_id
    prompt = await prepare(call, body, cuts_answer)
    predicted = body.prediction.text if body.prediction is not None else ""
    thinks = model.reasoning_format is not None
    (stream,) = await submit(call, [prompt.token_ids], prompt.params, body, thinks, predicted)
    make_parser = parsers(model, prompt.shape.tools, prompt.token_ids)
    if call.record.trace is not None:
        make_parser = call.record.trace.timed(make_parser)
    reading = Reading(make_parser, body.include_reasoning is not False, prompt.shape.is_named)
    return Conversation(model_name, prompt, stream, reading, thinking_counter(model, stream.request))


async def prepare(call: Call, body: ChatRequest, cuts_answer: bool = False) -> ChatPrompt:
    """What a body asks of the engine; RequestError says what is wrong with it."""
    llm = call.service.llm
    body.check(1, llm.serving)
    if body.has_shape:  # reading a schema may take a while
        shape = await llm.off_loop(lambda: chat_constraint(body, llm.model))
    else:
        shape = chat_constraint(body, llm.model)
    params = body.params(
        llm.model,
        max_tokens=llm.model.max_answer_tokens(body.asked_tokens),
        logprobs=body.num_logprobs(llm.serving),
        structured_outputs=shape.structured,
    )
    if shows_special_tokens(llm.model, shape.tools):
        params.skip_special_tokens = False
    num_answer_tokens = 1 if cuts_answer else body.asked_tokens or 1
    is_cut = body.truncate_prompt_tokens is not None
    token_ids = await encode_messages(llm, body.messages, body, shape.tools, may_be_cut=is_cut)
    token_ids = cut(token_ids, body, llm.model, num_answer_tokens)
    check_room(llm.model, token_ids, num_answer_tokens, "messages")
    text = await llm.decode(token_ids) if body.return_prompt_text else None
    return ChatPrompt(token_ids, text, params, shape)


class _Writer:
    """How the answer of one call is written."""

    def __init__(self, call: Call, body: ChatRequest, chat: Conversation) -> None:
        self.body = body
        self.prompt = chat.prompt
        self.stream = chat.stream
        self.reading = chat.reading
        self.num_thinking = chat.num_thinking
        self.echo = body.echoed()
        self.tokenizer: Tokenizer | None = call.service.llm.model.tokenizer
        self.head: dict[str, Any] = call.head("chatcmpl", chat.model_name)

    def completion(self) -> ChatCompletion:
        num_thinking = self.num_thinking() if self.num_thinking is not None else None
        return ChatCompletion(
            **self.head,
            choices=[self._choice(choice) for choice in self.stream.request.choices],
            usage=usage([self.stream], num_thinking=num_thinking),
            **self._beside(),
        )

    def _choice(self, choice: ChoiceState) -> ChatChoice:
        body, reading = self.body, self.reading
        message = reading.message(text_of(choice))
        if self.echo:
            message.content = self.echo + (message.content or "")
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice) if body.logprobs else None,
            finish_reason=reading.finish_reason(choice.finish_reason, has_calls=message.tool_calls is not UNSET),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if body.return_token_ids else UNSET,
        )

    def _logprobs(self, source: ChoiceState | ChoiceUpdate) -> ChatLogprobs:
        return chat_logprobs(source.logprobs, self.tokenizer, bool(self.body.return_tokens_as_token_ids))

    def _beside(self) -> dict[str, Any]:
        """What is said of the prompt, where it was asked for."""
        request = self.stream.request
        beside: dict[str, Any] = {}
        if self.body.return_token_ids:
            beside["prompt_token_ids"] = request.prompt_token_ids
        if self.body.wants_prompt_logprobs:
            beside["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs, self.tokenizer)
        if self.prompt.text is not None:
            beside["prompt_text"] = self.prompt.text
        return beside

    def event_format(self) -> EventFormat:
        body = self.body

        def opening(idx: int) -> tuple[dict[str, Any], dict[str, Any]]:
            delta = {"role": "assistant", "content": self.echo}
            return {"delta": delta, "logprobs": None}, self._beside() if idx == 0 else {}

        return EventFormat(
            head={**self.head, "object": "chat.completion.chunk"},
            before_text=b'"delta":{"content":',
            after_text=b"}",
            opening=opening,
            slow_opening=body.wants_prompt_logprobs,
            logprobs=self._logprobs if body.logprobs else None,
            token_ids=bool(body.return_token_ids),
            usage_at_end=body.usage_at_end,
            usage_always=body.usage_always,
            num_thinking=self.num_thinking,
        )
