"""Harmony, the format of gpt-oss: an answer is a series of messages, each with a header, a channel and a text.

The parser behind `reasoning/harmony.py` and `tools/harmony.py`. The channel analysis is reasoning, others are content,
and a message to functions.NAME is a call. Without tools, messages to anyone are passed on as they are: the parser with
the tools, which comes next, reads them.
"""

import re

from quire.frontend.parse import Emit, Malformed, Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools.base import Tool, ToolParser

START = "<|channel|>analysis<|message|>"
END = "<|end|>"

_ENDS = (END, "<|return|>", "<|call|>")
_STARTS = ("<|start|>", "<|channel|>")
_TEXT_MARKS = StopStrings((*_ENDS, *_STARTS))
_HEADER_MARKS = StopStrings(("<|message|>", *_ENDS))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony(ToolParser):
    """`starts_open`: the prompt ends inside a message of the analysis channel."""

    def __init__(self, tools: list[Tool] | None, starts_open: bool = False) -> None:
        self._passes_calls = tools is None
        self._starts_open = starts_open
        self._has_reasoning = False
        super().__init__(tools or [])

    def run(self) -> Steps[None]:
        """The prompt ends with "<|start|>assistant", so that a header comes first, or plain text."""
        if self._starts_open:
            yield from self._message_text(self._reason)
        elif (yield from self._begins_with_recipient()):
            yield from self.attempt(self._message())
        while mark := (yield from self.until(_TEXT_MARKS, self.content)):
            if mark in _ENDS:
                self.read(len(mark))
            else:
                yield from self.attempt(self._message())

    def _begins_with_recipient(self) -> Steps[bool]:
        """Whether a message to a function comes next, which is left unread."""
        found = yield from self.one_of(" to=functions.")
        self.unread(found)
        return bool(found)

    def _message(self) -> Steps[None]:
        header: list[str] = []
        mark = yield from self.until(_HEADER_MARKS, header.append)
        if mark != "<|message|>":
            raise Malformed
        self.read(len(mark))
        yield from self._body("".join(header))

    def _body(self, header: str) -> Steps[None]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            if self._passes_calls:
                start = "" if header.startswith("<|start|>") else "<|start|>assistant"
                self.content(f"{start}{header}<|message|>")
                yield from self._message_text(self.content, keeps_end=True)
            elif name in self.tools:
                yield from self.arguments_object(name)
                yield from self.space()
                yield from self.one_of(*_ENDS)
            else:
                raise Malformed
        elif channel is not None and channel[1] == "analysis":
            self._kept = None
            if self._has_reasoning:
                self.reasoning("\n")
            yield from self._message_text(self._reason)
        else:
            self._kept = None
            if self._has_content:
                self.content("\n")
            yield from self._message_text(self.content)

    def _reason(self, text: str) -> None:
        self._has_reasoning = True
        self.reasoning(text)

    def _message_text(self, emit: Emit, keeps_end: bool = False) -> Steps[None]:
        mark = yield from self.until(_TEXT_MARKS, emit)
        if mark in _ENDS:
            text = self.read(len(mark))
            if keeps_end:
                emit(text)
