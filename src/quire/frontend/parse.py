"""What a model wrote, taken apart as it arrives: content, reasoning and tool calls.

The server makes one `OutputParser` per choice from a format of `reasoning/` and one of `tools/`; both are built on
`StreamParser`, a parser written as straight-line code that waits for text where it needs more. Must not know any
format, tokens or protocols. Time is linear in the text, and no result depends on how the text was cut into pieces.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

import msgspec

from quire.frontend.stop import StopStrings

T = TypeVar("T")
Steps = Generator[None, None, T]  # a parser's code: it yields where it needs more text
Emit = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]+")


class CallDelta(msgspec.Struct):
    """News of one call: first its name, then pieces of the JSON text of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct):
    """What a piece of text made certain."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []


class Parser(Protocol):
    def feed(self, text: str) -> Delta: ...

    def finish(self) -> Delta:
        """What was held back, at the end of the text."""
        ...


class Malformed(Exception):
    """The text is not what it seemed to become: raised within a parser, never out of it.

    `text` is what was read but not passed on.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text


class StreamParser(ABC):
    """A parser whose `run` reads the text from beginning to end, by the methods below, and says what it finds."""

    def __init__(self) -> None:
        self._text = ""  # not read yet from `_at` on: never more than the beginning of a mark when `run` waits
        self._at = 0
        self._kept: list[str] | None = None  # what was read since someone asked to keep it
        self._ended = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._steps = self.run()

    @abstractmethod
    def run(self) -> Steps[None]: ...

    def feed(self, text: str) -> Delta:
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._steps, None)
        return self.news()

    def finish(self) -> Delta:
        self._ended = True
        return self.feed("")

    def news(self) -> Delta:
        delta = Delta("".join(self._content), "".join(self._reasoning))
        self._content, self._reasoning = [], []
        return delta

    def content(self, text: str) -> None:
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    # Reading. Where text may be the beginning of a mark, these wait until that is certain.

    def peek(self) -> Steps[str]:
        """The next character, left unread; "" at the end of the text."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._kept is not None:
            self._kept.append(text)
        return text

    def unread(self, text: str) -> None:
        """Gives back what was read last."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:  # part of it came in earlier pieces
            self._text = text + self._text[self._at :]
            self._at = 0

    def read_run(self, pattern: re.Pattern[str]) -> str:
        """What matches here in the text so far: "" when nothing does."""
        match = pattern.match(self._text, self._at)
        return self.read(match.end() - self._at) if match else ""

    def one_of(self, *strings: str) -> Steps[str]:
        """The longest of the strings that comes next, read; "" if none does."""
        longest = max(map(len, strings), default=0)
        while True:
            text = self._text[self._at : self._at + longest]
            may_grow = any(len(text) < len(string) and string.startswith(text) for string in strings)
            if self._ended or not may_grow:
                return self.read(max((len(string) for string in strings if text.startswith(string)), default=0))
            yield

    def expect(self, *strings: str) -> Steps[str]:
        if found := (yield from self.one_of(*strings)):
            return found
        raise Malformed

    def space(self, emit: Emit | None = None) -> Steps[None]:
        while (yield from self.peek()).isspace():
            text = self.read_run(SPACE)
            if not text:  # space of another kind: no syntax has it
                return
            if emit is not None:
                emit(text)

    def until(self, marks: StopStrings, emit: Emit) -> Steps[str]:
        """Passes text on up to the first mark, which is returned and left unread; "" at the end of the text."""
        step, found = marks.step, marks.found
        while True:
            text, state = self._text, 0
            for idx in range(self._at, len(text)):
                state = step(state, text[idx])
                if (mark := found[state]) is not None:
                    self._pass(idx + 1 - len(mark), emit)
                    return mark
            self._pass(len(text) - (0 if self._ended else marks.depth[state]), emit)
            if self._ended:
                return ""
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        while (yield from self.peek()):
            self._pass(len(self._text), emit)

    def _pass(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self.read(end - self._at))


class Trimmed:
    """Passes text on without the white space around it: what may be its end waits for more."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._space: list[str] | None = None  # None before the first word

    def __call__(self, text: str) -> None:
        if self._space is None:
            text = text.lstrip()
        words = text.rstrip()
        if words:
            self._emit("".join(self._space or ()) + words)
            self._space = []
        if self._space is not None:
            self._space.append(text[len(words) :])


class OutputParser:
    """Reasoning taken out first, then calls, then the spellings of special tokens; each stage may be absent.

    `specials` are the tokenizer's special tokens where text was made with them because a format needs them.
    """

    def __init__(self, reasoning: Parser | None, tools: Parser | None, specials: StopStrings | None = None) -> None:
        self._stages = [stage for stage in (reasoning, tools) if stage is not None]
        self._filters = None if specials is None else (_Without(specials), _Without(specials))

    def feed(self, text: str) -> Delta:
        delta = Delta(content=text)
        for stage in self._stages:
            delta = _joined(delta, [stage.feed(delta.content)])
        if self._filters is not None:
            of_content, of_reasoning = self._filters
            delta.content = of_content.feed(delta.content).content
            delta.reasoning = of_reasoning.feed(delta.reasoning).content
        return delta

    def finish(self) -> Delta:
        delta = Delta()
        for stage in self._stages:
            delta = _joined(delta, [stage.feed(delta.content), stage.finish()])
        if self._filters is not None:
            of_content, of_reasoning = self._filters
            delta.content = of_content.feed(delta.content).content + of_content.finish().content
            delta.reasoning = of_reasoning.feed(delta.reasoning).content + of_reasoning.finish().content
        return delta


class _Without(StreamParser):
    """Text without some strings."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        super().__init__()

    def run(self) -> Steps[None]:
        while mark := (yield from self.until(self._strings, self.content)):
            self.read(len(mark))


def _joined(before: Delta, news: Iterable[Delta]) -> Delta:
    """`news` is what a stage made of the content of `before`."""
    joined = Delta(reasoning=before.reasoning, calls=before.calls)
    for delta in news:
        joined.content += delta.content
        joined.reasoning += delta.reasoning
        joined.calls = joined.calls + delta.calls
    return joined
