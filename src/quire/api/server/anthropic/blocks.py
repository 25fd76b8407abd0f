"""Answers as Anthropic's blocks: what parsers find, put into blocks of thinking, text and calls, one after another.

Used by `messages.py` for whole answers and by `events.py` for streams, which come to the same blocks.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.anthropic.body import TextBlock, ThinkingBlock, ToolUseBlock
from quire.api.server.chat import Conversation
from quire.api.server.generation import usage
from quire.api.server.reading import call_id
from quire.frontend.parse import Delta

Kind = Literal["thinking", "text", "tool_use"]
Shown = Literal["shown", "omitted", "hidden"]  # how thinking is: omitted blocks are there, but empty
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TokenDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """The prompt has as many tokens as `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: TokenDetails | UnsetType = UNSET


class Stop(NamedTuple):
    reason: str
    sequence: str | None = None


class Piece(NamedTuple):
    """The beginning of a block, or more of the one that was begun last."""

    kind: Kind
    text: str  # of its thinking or text, or of the JSON of its input
    begins: bool
    name: str = ""  # of the tool


class Blocks:
    """Puts what a parser finds into blocks."""

    def __init__(self, thinking: Shown) -> None:
        self.thinking = thinking
        self.last: Kind | None = None  # the block that was begun last
        self.has_calls = False
        self._space = ""  # white space before a text: dropped where no text comes
        self._arguments: list[str] = []  # of the last call

    def take(self, delta: Delta) -> Iterator[Piece]:
        calls = delta.calls
        while calls and calls[0].name is None:  # the rest of a call comes before what was said after it
            yield self._more(calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning and self.thinking != "hidden":
            yield self._piece("thinking", delta.reasoning if self.thinking == "shown" else "")
        if delta.content:
            yield from self._text(delta.content)
        for call in calls:
            if call.name is None:
                yield self._more(call.arguments)
            else:
                self._space = ""
                self.last, self.has_calls = "tool_use", True
                self._arguments = [call.arguments]
                yield Piece("tool_use", call.arguments, True, call.name)

    def end(self) -> Iterator[Piece]:
        """Every answer has a block."""
        if self.last is None:
            yield self._piece("text", self._space)

    def _text(self, text: str) -> Iterator[Piece]:
        if self.last != "text":
            text, self._space = self._space + text, ""
            if text.isspace():
                self._space = text
                return
        yield self._piece("text", text)

    def _piece(self, kind: Kind, text: str) -> Piece:
        begins = self.last != kind
        self.last = kind
        return Piece(kind, text, begins)

    def _more(self, arguments: str) -> Piece:
        self._arguments.append(arguments)
        return Piece("tool_use", arguments, False)

    def calls_are_whole(self) -> bool:
        """Whether there are calls, the last of which was not cut off."""
        return self.has_calls and _object("".join(self._arguments)) is not None


def put_together(pieces: Iterable[Piece]) -> list[AnswerBlock]:
    """The blocks of a whole answer. A call that was cut off is left out: nobody could tell that it is no whole one."""
    begun: list[tuple[Piece, list[str]]] = []
    for piece in pieces:
        if piece.begins:
            begun.append((piece, []))
        begun[-1][1].append(piece.text)
    blocks = [_block(first, "".join(texts)) for first, texts in begun]
    return [block for block in blocks if block is not None] or [TextBlock("")]


def _block(first: Piece, text: str) -> AnswerBlock | None:
    if first.kind == "text":
        return TextBlock(text)
    if first.kind == "thinking":
        return ThinkingBlock(text, signature())
    arguments = _object(text)
    return ToolUseBlock(call_id("toolu_"), first.name, arguments) if arguments is not None else None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def signature() -> str:
    """Clients send it back with the thinking. It is not checked: whoever may send messages may send any."""
    return call_id("sig_")


def stop_of(
    chat: Conversation, blocks: Blocks, reason: str | None, stop: int | str | None, asked: int, max_model_len: int
) -> Stop:
    """Why an answer of at most `asked` tokens ended."""
    request = chat.stream.request
    num_tokens = len(request.choices[0].token_ids)
    if reason == "length":
        is_full = len(request.prompt_token_ids) + num_tokens >= max_model_len and num_tokens < asked
        return Stop("model_context_window_exceeded" if is_full else "max_tokens")
    if isinstance(stop, str) and not blocks.calls_are_whole():
        return Stop("stop_sequence", stop)
    return Stop("tool_use" if blocks.has_calls else "end_turn")


def message_usage(chat: Conversation) -> MessageUsage:
    """What was used so far."""
    num_thinking = chat.num_thinking() if chat.num_thinking is not None else None
    counted = usage([chat.stream])
    num_cached = counted.prompt_tokens_details.cached_tokens
    return MessageUsage(
        counted.prompt_tokens - num_cached,
        num_cached,
        counted.completion_tokens,
        output_tokens_details=TokenDetails(num_thinking) if num_thinking is not None else UNSET,
    )
