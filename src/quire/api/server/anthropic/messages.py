"""/v1/messages and /v1/messages/count_tokens: conversations in Anthropic's protocol, whole or as a stream.

Called by `app.py`. What a body asks for is done by `chat.py`, of the chat body that `translate.py` makes of it.
"""

from typing import Literal, TypeVar

import msgspec

from quire.api.server.anthropic.blocks import (
    AnswerBlock,
    Blocks,
    MessageUsage,
    Piece,
    Shown,
    message_usage,
    put_together,
    stop_of,
)
from quire.api.server.anthropic.body import CountTokensRequest, MessagesRequest, ThinkingOptions
from quire.api.server.anthropic.errors import NO_THREADS
from quire.api.server.anthropic.events import MessageEvents
from quire.api.server.anthropic.translate import to_chat
from quire.api.server.calls import Answer, Call
from quire.api.server.chat import ChatRequest, Conversation, start
from quire.api.server.fields import decode
from quire.api.server.generation import built, finish
from quire.api.server.prompts import encode_messages
from quire.api.server.shape import chat_constraint
from quire.api.server.sse import EventStream
from quire.errors import RequestError, TooLongError

Body = TypeVar("Body", bound=CountTokensRequest)


class AnswerMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


async def messages(call: Call) -> Answer | EventStream:
    body, asked = await _read(call, MessagesRequest)
    try:
        chat = await start(call, asked, cuts_answer=True)
    except TooLongError as error:
        raise _too_long(error) from None
    max_model_len = call.service.llm.model.max_model_len
    thinking = _shown(body.thinking)
    answer_id = call.answer_id("msg_")
    if body.stream:
        head = {"id": answer_id, "type": "message", "role": "assistant", "model": chat.model_name}
        return EventStream(MessageEvents(chat, head, thinking, body.max_tokens, max_model_len), call)
    await finish(call, [chat.stream])

    def whole() -> AnswerMessage:
        choice = chat.stream.request.choices[0]
        blocks = Blocks(thinking)
        content = put_together(_pieces(chat, blocks))
        stop = stop_of(chat, blocks, choice.finish_reason, choice.stop_reason, body.max_tokens, max_model_len)
        return AnswerMessage(
            id=answer_id,
            model=chat.model_name,
            content=content,
            stop_reason=stop.reason,
            stop_sequence=stop.sequence,
            usage=message_usage(chat),
        )

    return await built(call, whole)


async def count_tokens(call: Call) -> Answer:
    """The tokens of a prompt, also of one that is longer than the context: clients count to know what to leave out."""
    _, asked = await _read(call, CountTokensRequest)
    llm = call.service.llm
    call.service.model_name(asked.model)
    shape = await llm.off_loop(lambda: chat_constraint(asked, llm.model))
    try:
        token_ids = await encode_messages(llm, asked.messages, asked, shape.tools, may_be_cut=True)
    except TooLongError as error:
        raise _too_long(error) from None
    return Answer.json(TokenCount(len(token_ids)))


async def _read(call: Call, kind: type[Body]) -> tuple[Body, ChatRequest]:
    try:
        body = await decode(call.body, kind)
    except RequestError as error:
        raise _in_words(error) from None
    return body, to_chat(body, call.service.llm.model.template.takes_late_system)


def _in_words(error: RequestError) -> RequestError:
    """What is there that this server does not do, where that is why a body was refused."""
    param = error.param or ""
    if param == "thread":
        return RequestError("this server keeps no conversations: send all messages", param, NO_THREADS)
    if error.code != "invalid_value" or not param.endswith("].type"):
        return error
    found = str(error).partition("value ")[2]
    if param.startswith("tools["):
        text = f"tools of type {found:.80} are not supported: this server runs none itself, send name and input_schema"
    else:
        where = "messages hold text, thinking, tool_use and tool_result; tool results and system text hold text"
        text = f"blocks of type {found:.80} are not supported here: {where}"
    return RequestError(text, param, "unsupported_value")


def _too_long(error: TooLongError) -> TooLongError:
    """In Anthropic's words, by which clients know that they have to shorten a conversation."""
    limit = error.limit - 1  # an answer has a token at least
    return TooLongError(f"prompt is too long: {error.num_prompt_tokens} tokens > {limit} maximum", "messages")


def _shown(asked: ThinkingOptions | None) -> Shown:
    if asked is None:
        return "shown"
    if asked.type == "disabled":
        return "hidden"
    return "omitted" if asked.display == "omitted" else "shown"


def _pieces(chat: Conversation, blocks: Blocks) -> list[Piece]:
    """What the answer holds, read piece by piece, as a stream is: so that both have the same blocks."""
    parser = chat.reading.parser()
    texts = chat.stream.request.choices[0].texts
    deltas = [*map(parser.feed, texts), parser.finish()]
    return [*(piece for delta in deltas for piece in blocks.take(delta)), *blocks.end()]
