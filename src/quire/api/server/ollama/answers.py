"""Answers in Ollama's protocol: a line of JSON for everything new, the last one with counts and times, or one whole.

Made by `generate.py`. A line of text is made of bytes that are encoded once per request and the JSON of the new text.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.api.server.calls import Call
from quire.api.server.generation import text_of
from quire.api.server.logprobs import ChatLogprob, chat_logprobs
from quire.api.server.reading import Reading, deltas_of
from quire.api.server.sse import Events, to_json
from quire.frontend.async_llm import Stream
from quire.frontend.parse import CallDelta
from quire.frontend.requests import ChoiceUpdate
from quire.frontend.tokenizer import Tokenizer
from quire.step import TokenLogprobs

HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies: pass each line on at once
]


def created_at(call: Call) -> str:
    return datetime.fromtimestamp(call.created_s, UTC).isoformat().replace("+00:00", "Z")


class CalledOllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct):
    function: CalledOllamaFunction


class OllamaAnswer(msgspec.Struct, frozen=True):
    content: str = ""
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """What every line has; times are in nanoseconds, and only in the last one."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # until its first step: models are never loaded for a request
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ChatLine(Line, kw_only=True):
    message: OllamaAnswer = OllamaAnswer()


class GenerateLine(Line, kw_only=True):
    response: str = ""
    thinking: str | UnsetType = UNSET


@dataclass(frozen=True)
class Source:
    """An answer under way, and how it is read."""

    stream: Stream
    reading: Reading
    tokenizer: Tokenizer | None
    shows_logprobs: bool

    def logprobs(self, entries: list[TokenLogprobs]) -> list[ChatLogprob]:
        return chat_logprobs(entries, self.tokenizer).content

    def ending(self) -> dict[str, Any]:
        """The fields of the last line."""
        request = self.stream.request
        times = request.metrics
        (choice,) = request.choices
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(times.queued_ts, times.finished_ts),
            "load_duration": _nanoseconds(times.queued_ts, times.scheduled_ts),
            "prompt_eval_count": len(request.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(times.scheduled_ts, times.first_token_ts),
            "eval_count": len(choice.token_ids),
            "eval_duration": _nanoseconds(times.first_token_ts, times.last_token_ts),
        }


def _nanoseconds(start_s: float, end_s: float) -> int:
    """0 where one of the two has not happened."""
    return max(0, int((end_s - start_s) * 1e9)) if start_s and end_s else 0


class Lines(Events):
    """The one answer to a call."""

    headers = HEADERS
    before_text: ClassVar[bytes]  # of a line, from its head to its text
    after_text: ClassVar[bytes]

    def __init__(self, source: Source, model: str, created: str) -> None:
        super().__init__([source.stream], 1)
        self.source = source
        self.in_parts = source.shows_logprobs
        self.parser = source.reading.parser()
        self.head: dict[str, Any] = {"model": model, "created_at": created}
        self.before = to_json(self.head)[:-1] + b"," + self.before_text
        self.after = self.after_text + b',"done":false}\n'
        self.is_plain = source.reading.is_plain and not source.shows_logprobs
        self.name = ""  # of the call under way
        self.arguments: list[str] = []

    @abstractmethod
    def line(self, content: str, thinking: str, calls: list[OllamaToolCall], **fields: Any) -> Line: ...

    def whole(self) -> Line:
        (choice,) = self.source.stream.request.choices
        message = self.source.reading.message(text_of(choice))
        found = message.tool_calls if message.tool_calls is not UNSET else []
        calls = [read_call(each.function.name, each.function.arguments) for each in found]
        fields = self.source.ending()
        if self.source.shows_logprobs:
            fields["logprobs"] = self.source.logprobs(choice.logprobs)
        thinking = message.reasoning if isinstance(message.reasoning, str) else ""
        return self.line(message.content or "", thinking, [call for call in calls if call is not None], **fields)

    def encode(self, updates: list[ChoiceUpdate]) -> bytes:
        lines: list[bytes] = []
        for update in updates:
            if not self.is_plain:
                lines += (to_json(line) + b"\n" for line in self._lines(update))
            elif update.text:
                lines += self.before, to_json(update.text), self.after
        return b"".join(lines)

    def end(self) -> bytes:
        return to_json(self.line("", "", [], **self.source.ending())) + b"\n"

    def failed(self, error: bytes) -> bytes:
        return error + b"\n"

    def _lines(self, update: ChoiceUpdate) -> Iterator[Line]:
        logprobs: dict[str, Any] = {}
        if self.source.shows_logprobs and update.logprobs:
            logprobs["logprobs"] = self.source.logprobs(update.logprobs)
        for delta in deltas_of(self.parser, update):
            thinking = delta.reasoning if self.source.reading.shows_reasoning else ""
            calls = [call for each in delta.calls if (call := self._finished(each)) is not None]
            if thinking or delta.content or calls or logprobs:
                yield self.line(delta.content, thinking, calls, done=False, **logprobs)
                logprobs = {}
        if update.finish_reason is not None and (last := self._finished(None)) is not None:
            yield self.line("", "", [last], done=False)

    def _finished(self, news: CallDelta | None) -> OllamaToolCall | None:
        """The call before this one, which ends where another begins, or the answer does: clients want whole ones."""
        finished = None
        if news is None or news.name is not None:
            finished = read_call(self.name, "".join(self.arguments)) if self.name else None
            self.name, self.arguments = "", []
        if news is not None:
            self.name = news.name or self.name
            self.arguments.append(news.arguments)
        return finished


class ChatLines(Lines):
    before_text = b'"message":{"role":"assistant","content":'
    after_text = b"}"

    def line(self, content: str, thinking: str, calls: list[OllamaToolCall], **fields: Any) -> Line:
        message = OllamaAnswer(content, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return ChatLine(**self.head, message=message, **fields)


class GenerateLines(Lines):
    before_text = b'"response":'
    after_text = b""

    def line(self, content: str, thinking: str, calls: list[OllamaToolCall], **fields: Any) -> Line:
        return GenerateLine(**self.head, response=content, thinking=thinking or UNSET, **fields)


def read_call(name: str, arguments: str) -> OllamaToolCall | None:
    """A call as Ollama writes it, with its arguments as an object; None for one that was cut off."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return OllamaToolCall(CalledOllamaFunction(name, found)) if isinstance(found, dict) else None
