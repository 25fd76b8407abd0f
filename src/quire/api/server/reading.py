"""Splits a chat's answers into content, thinking and tool calls, whole or as events.

Used by `chat.py` where the model thinks or has tools; other answers are sent as they are. How text is read is the
business of `frontend/parse.py` and the formats.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.sse import ChoiceEvents, EventFormat, to_json
from quire.frontend.async_llm import Stream
from quire.frontend.detokenize import Detokenizer
from quire.frontend.model import ModelInfo
from quire.frontend.parse import Delta, OutputParser, Parser
from quire.frontend.requests import ChoiceState, ChoiceUpdate, RequestState
from quire.frontend.tokenizer import Tokenizer


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""  # JSON


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    # Thinking, by both of its names: vLLM's, and the one that most clients know.
    reasoning: str | None | UnsetType = UNSET
    reasoning_content: str | None | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


@dataclass(frozen=True)
class Reading:
    """How answers are read before they are sent."""

    make_parser: Callable[[], OutputParser] | None  # None: an answer is plain text
    shows_reasoning: bool
    is_named: bool  # the request names the tool to call

    @property
    def is_plain(self) -> bool:
        return self.make_parser is None

    def message(self, text: str) -> ChatMessage:
        return ChatMessage(text) if self.is_plain else _read(self.parser(), self.shows_reasoning, text)

    def parser(self) -> OutputParser:
        """A parser for one answer."""
        return self.make_parser() if self.make_parser is not None else OutputParser(None, None)

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        ends_with_calls = has_calls and not self.is_named
        return "tool_calls" if reason == "stop" and ends_with_calls else reason


def _read(parser: OutputParser, shows_reasoning: bool, text: str) -> ChatMessage:
    body, end = parser.feed(text), parser.finish()
    calls: list[ToolCall] = []
    for call_delta in (*body.calls, *end.calls):
        if call_delta.name is not None:
            calls.append(ToolCall(call_id(), CalledFunction(call_delta.name)))
        calls[call_delta.index].function.arguments += call_delta.arguments
    content: str | None = body.content + end.content
    if not content and calls:
        content = None
    thoughts = (body.reasoning + end.reasoning or None) if shows_reasoning else UNSET
    return ChatMessage(
        content,
        reasoning=thoughts,
        reasoning_content=thoughts,
        tool_calls=calls or UNSET,
    )


def deltas_of(parser: OutputParser, update: ChoiceUpdate) -> list[Delta]:
    """What an update made certain, and at the end of an answer what was held back until then."""
    news = [parser.feed(update.text)]
    return news if update.finish_reason is None else [*news, parser.finish()]


class ThinkingCount:
    """Counts the tokens of a choice that come before its answer, as it grows, reading each token once."""

    def __init__(self, choice: ChoiceState, parser: Parser, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        """`parser`: a fresh one of the model's thinking."""
        self.choice = choice
        self.parser = parser
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=choice.params.skip_special_tokens,
            spaces_between_special_tokens=choice.params.spaces_between_special_tokens,
        )
        self.num_read = 0
        self.has_thoughts = False
        self.is_over = False

    def count(self) -> int:
        token_ids = self.choice.token_ids
        while not self.is_over and self.num_read < len(token_ids):
            delta = self.parser.feed(self.detokenizer.feed_one(token_ids[self.num_read]))
            self.has_thoughts = self.has_thoughts or bool(delta.reasoning)
            if delta.content:
                self.is_over = True
            else:
                self.num_read += 1
        return self.num_read if self.has_thoughts else 0


def thinking_counter(model: ModelInfo, request: RequestState) -> Callable[[], int] | None:
    """Says how many tokens of a request's answers are thinking so far; None where the model does not think."""
    form, tokenizer, prompt_ids = model.reasoning_format, model.tokenizer, request.prompt_token_ids
    if form is None or tokenizer is None:
        return None
    is_open = model.thinking_is_open(prompt_ids)
    counts = [ThinkingCount(choice, form.Parser(is_open), tokenizer, prompt_ids) for choice in request.choices]
    return lambda: sum(count.count() for count in counts)


def call_id(prefix: str = "call_") -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def _without_content(form: EventFormat) -> Callable[[int], tuple[dict[str, Any], dict[str, Any]]]:
    """Opens a choice with null for its content, as the whole answer has where there is none but calls."""

    def opening(idx: int) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, beside = form.opening(idx) or ({"delta": {}}, {})
        return {**fields, "delta": {"role": "assistant", "content": fields["delta"].get("content") or None}}, beside

    return opening


class ParsedEvents(ChoiceEvents):
    """Events of answers in which thinking and calls are told from content."""

    def __init__(self, form: EventFormat, streams: Sequence[Stream], n: int, reading: Reading) -> None:
        super().__init__(replace(form, opening=_without_content(form)), streams, n)
        self.reading = reading
        self.parsers = [reading.parser() for _ in self.before]
        self.has_calls = [False] * len(self.parsers)

    def encode(self, updates: list[ChoiceUpdate]) -> bytes:
        events = []
        if self.form.usage_at_end and self.form.num_thinking is not None:
            self.form.num_thinking()  # now and not at the end, when it would take long
        for update in updates:
            if update.index in self.unopened:
                events.append(self._opening(update.index))
            events += self._parsed(update)
        return b"".join(events)

    def _parsed(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """An event each for thinking, content and calls; none for text that may yet turn out to be any of them."""
        parser = self.parsers[update.index]
        is_last = update.finish_reason is not None
        deltas = [shown for delta in deltas_of(parser, update) for shown in self._shown(update.index, delta)]
        if is_last:
            # A message without calls has content, if empty.
            deltas.append({} if self.has_calls[update.index] else {"content": ""})
        elif not deltas and not self.plain:
            deltas.append({})  # for the logprobs or ids of tokens that make no text yet
        for idx, fields in enumerate(deltas):
            yield self._event(update, fields, is_first=idx == 0, is_end=is_last and idx == len(deltas) - 1)

    def _shown(self, choice_idx: int, delta: Delta) -> list[dict[str, Any]]:
        """What a parser found, as the `delta` of an event each."""
        shown: list[dict[str, Any]] = []
        if delta.reasoning and self.reading.shows_reasoning:
            shown.append({"reasoning": delta.reasoning, "reasoning_content": delta.reasoning})
        if delta.content:
            shown.append({"content": delta.content})
        for call in delta.calls:
            self.has_calls[choice_idx] = True
            fields: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is not None:
                function = {"name": call.name, "arguments": call.arguments}
                fields |= {"id": call_id(), "type": "function", "function": function}
            shown.append({"tool_calls": [fields]})
        return shown

    def _event(self, update: ChoiceUpdate, fields: dict[str, Any], *, is_first: bool, is_end: bool) -> bytes:
        choice: dict[str, Any] = {"index": update.index, "delta": fields, "logprobs": None, "finish_reason": None}
        has_tokens = is_first and bool(update.token_ids)
        if has_tokens and self.form.logprobs is not None:
            choice["logprobs"] = self.form.logprobs(update)
        if is_end:
            choice["finish_reason"] = self.reading.finish_reason(update.finish_reason, self.has_calls[update.index])
            choice["stop_reason"] = update.stop_reason
        if self.form.token_ids:
            choice["token_ids"] = update.token_ids if is_first else []
        return self.head + to_json(choice) + b"]" + self._usage_now() + b"}\n\n"
