"""What the tool-call formats share: streaming calls, reading JSON, and the grammar of "text and calls".

Imported by the formats beside it and by harmony. A call begins when it is certain: its name is one of the tools' and
its arguments have begun. Text that only seemed to be one is content. A call that breaks after it began keeps the
arguments streamed so far, visibly incomplete (never closed for the model: half a command must not look whole), and the
rest of the text is content. Nothing is evaluated.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from quire.frontend.parse import CallDelta, Delta, Emit, Malformed, Steps, StreamParser
from quire.frontend.stop import StopStrings

Tool = dict[str, Any]
Format = dict[str, Any]  # of xgrammar's structural tags

MAX_DEPTH = 64  # of nesting in arguments
MAX_SCALAR_CHARS = 1000  # clients must be able to read it: Python's own limit for integers is 4,300 digits
_MAX_LISTED = 8  # tools whose calls are written out for each of them
_MAX_SPACE = 16  # characters in a row, so that a model cannot indent for ever

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR_CHARS = re.compile(r"[-+.\w]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class ToolParser(StreamParser):
    """Says content and calls. White space around calls is not content."""

    def __init__(self, tools: list[Tool]) -> None:
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._calls: list[CallDelta] = []
        self._pieces: list[str] = []  # of the last call's arguments, since the last news
        self._num_calls = 0
        self._space: list[str] = []  # after the content so far: shown when more follows
        self._has_content = False
        super().__init__()

    def news(self) -> Delta:
        self._flush_arguments()
        if self._ended and not self._num_calls:
            self._content += self._space
            self._space = []
        delta = super().news()
        delta.calls, self._calls = self._calls, []
        return delta

    def content(self, text: str) -> None:
        if self._num_calls and not self._has_content:
            text = text.lstrip()
        words = text.rstrip()
        if words:
            self._content += [*self._space, words]
            self._space = []
            self._has_content = True
        self._space.append(text[len(words) :])

    def begin_call(self, name: str) -> None:
        """From here on the text read is the call's, not content."""
        self._flush_arguments()
        if not self._has_content:
            self._space = []
        self._calls.append(CallDelta(self._num_calls, name))
        self._num_calls += 1
        self._kept = None

    def arguments(self, text: str) -> None:
        self._pieces.append(text)

    def end_call(self) -> None:
        """What comes next belongs to no call yet."""
        self._kept = []

    def _flush_arguments(self) -> None:
        if self._pieces:
            self._calls.append(CallDelta(self._num_calls - 1, None, "".join(self._pieces)))
            self._pieces = []

    def attempt(self, steps: Steps[None]) -> Steps[None]:
        """Reads what may be a call; what turns out not to be one is content."""
        self._kept = []
        try:
            yield from steps
        except Malformed as broken:
            if self._kept is not None:
                self.content("".join(self._kept))
            elif self._ended:  # cut short inside a call
                self.arguments(broken.text + self.read(len(self._text)))
            else:
                self.content(broken.text)
        self._kept = None

    def name(self) -> Steps[str]:
        return (yield from self.expect(*self.tools))

    # Values: JSON here; a format with other spellings overrides the parts. What is emitted is always JSON.

    QUOTES = '"'
    CLOSERS = {"{": "}", "[": "]"}

    def value(self, emit: Emit) -> Steps[None]:
        """Passes one value on."""
        closers: list[str] = []
        while True:
            yield from self.space(emit)
            char = yield from self.peek()
            if char and char in self.CLOSERS:
                if len(closers) == MAX_DEPTH:
                    raise Malformed
                self.read(1)
                emit("{" if char == "{" else "[")
                closers.append(self.CLOSERS[char])
                yield from self.space(emit)
                if (yield from self.peek()) != closers[-1]:
                    yield from self._key(closers, emit)
                    continue
            elif char and char in self.QUOTES:
                yield from self.string(emit)
            else:
                yield from self._scalar(emit)
            while closers:
                yield from self.space(emit)
                if (yield from self.peek()) == closers[-1]:
                    self.read(1)
                    emit("}" if closers.pop() == "}" else "]")
                    continue
                emit((yield from self.expect(",")))
                yield from self._key(closers, emit)
                break
            else:
                return

    def _key(self, closers: list[str], emit: Emit) -> Steps[None]:
        if closers[-1] == "}":
            yield from self.space(emit)
            yield from self.property_name(emit)
            yield from self.space(emit)
            emit((yield from self.expect(":")))

    def property_name(self, emit: Emit) -> Steps[None]:
        yield from self.string(emit)

    def string(self, emit: Emit) -> Steps[None]:
        emit((yield from self.expect('"')))
        while (char := (yield from self.peek())) != '"':
            if char == "\\":
                emit((yield from self._escape()))
            elif not char:
                raise Malformed
            elif char < " ":  # not JSON, but what is meant is certain
                emit(json.dumps(self.read(1))[1:-1])
            else:
                emit(self.read_run(_PLAIN))
        emit(self.read(1))

    def _escape(self) -> Steps[str]:
        while _ESCAPE_BEGUN.match(self._text, self._at) and not self._ended:
            yield
        if text := self.read_run(_ESCAPE):
            return text
        raise Malformed

    def _scalar(self, emit: Emit) -> Steps[None]:
        text = ""
        while (yield from self.peek()) and len(text) <= MAX_SCALAR_CHARS:
            match = _SCALAR_CHARS.match(self._text, self._at)
            if match is None:
                break
            text += self.read(min(len(match[0]), MAX_SCALAR_CHARS + 1 - len(text)))
        spelled = self.scalar(text) if 0 < len(text) <= MAX_SCALAR_CHARS else None
        if spelled is None:
            raise Malformed(text)
        emit(spelled)

    def scalar(self, text: str) -> str | None:
        """A number or a word as JSON; None if it is neither."""
        return text if _SCALAR.fullmatch(text) else None

    def text(self) -> Steps[str]:
        """A string's text."""
        pieces: list[str] = []
        yield from self.string(pieces.append)
        return json.loads("".join(pieces))

    def arguments_object(self, name: str) -> Steps[None]:
        """A call of which only the arguments are left to read: an object."""
        yield from self.space()
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call(name)
        yield from self.value(self.arguments)
        self.end_call()


def quoted(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Value(ToolParser):
    """One JSON value and nothing else."""

    is_valid = False

    def run(self) -> Steps[None]:
        try:
            yield from self.value(lambda text: None)
            yield from self.space()
            self.is_valid = not (yield from self.peek())
        except Malformed:
            pass


def is_json(text: str) -> bool:
    """Whether text is JSON that clients can read, without building it."""
    value = _Value([])
    value.feed(text)
    value.finish()
    return value.is_valid


class JsonCalls(ToolParser):
    """Calls written as JSON objects with a name and arguments, one or a list, between marks or bare."""

    OPENERS: tuple[str, ...] = ()
    CLOSERS_AFTER: tuple[str, ...] = ()
    BARE: tuple[str, ...] = ()  # the characters that may begin calls without an opener
    SEPARATORS: tuple[str, ...] = ()  # between objects that are not in a list
    NAME_KEYS: tuple[str, ...] = ("name",)
    ARGUMENTS_KEYS = ("arguments", "parameters")

    def __init__(self, tools: list[Tool]) -> None:
        self._marks = StopStrings(self.OPENERS + self.BARE)
        super().__init__(tools)

    def run(self) -> Steps[None]:
        while (yield from self.until(self._marks, self.content)):
            yield from self.attempt(self.calls())

    def calls(self) -> Steps[None]:
        yield from self.one_of(*self.OPENERS)
        yield from self.space()
        if (yield from self.one_of("[")):
            yield from self.listed_calls()
        else:
            yield from self.call()
            while (yield from self._another()):
                yield from self.call()
        yield from self.space()
        yield from self.one_of(*self.CLOSERS_AFTER)

    def listed_calls(self) -> Steps[None]:
        while True:
            yield from self.space()
            yield from self.call()
            yield from self.space()
            if (yield from self.expect(",", "]")) == "]":
                self.end_call()
                return

    def _another(self) -> Steps[bool]:
        yield from self.space()
        separator = yield from self.one_of(*self.SEPARATORS)
        yield from self.space()
        return bool(separator or (yield from self.peek()) == "{")

    def call(self) -> Steps[None]:
        """{"name": …, "arguments": {…}}; other members are left out, or tell that a bare object is no call."""
        name = ""
        early: str | None = None  # arguments that came before the name
        is_begun = False
        yield from self.expect("{")
        while True:
            yield from self.space()
            key = yield from self.text()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            has_arguments = is_begun or early is not None
            if key in self.NAME_KEYS and not name:
                name = yield from self.text()
                if name not in self.tools:
                    raise Malformed
                if early is not None:
                    is_begun = True
                    self._whole_call(name, early)
            elif key in self.ARGUMENTS_KEYS and not has_arguments:
                if name:
                    is_begun = True
                    yield from self._call_arguments(name)
                else:
                    early = yield from self._early_arguments()
            elif self.BARE and key not in ("id", "type"):
                raise Malformed
            else:
                yield from self.value(lambda text: None)
            yield from self.space()
            if (yield from self.expect(",", "}")) == "}":
                break
        if not name:
            raise Malformed
        if not is_begun:
            self._whole_call(name, "{}")
        self.end_call()

    def _call_arguments(self, name: str) -> Steps[None]:
        if (yield from self.peek()) == "{":
            yield from self.arguments_object(name)
        else:
            self._whole_call(name, (yield from self._early_arguments()))

    def _early_arguments(self) -> Steps[str]:
        """Arguments as a whole: an object, an object's JSON text in a string, or null for none."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        text = "".join(pieces)
        if text.startswith('"'):
            text = json.loads(text).strip()
        if text == "null":
            return "{}"
        if not text.startswith("{") or not is_json(text):
            raise Malformed
        return text

    def _whole_call(self, name: str, arguments: str) -> None:
        self.begin_call(name)
        self.arguments(arguments)
        self.end_call()


# Grammars


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object even where the schema does not say so."""
    schema = tool["function"].get("parameters") or {}
    return schema if "$ref" in schema else {**schema, "type": "object"}


def arguments_of(tool: Tool, **style: str) -> Format:
    return {"type": "json_schema", "json_schema": schema_of(tool), "max_whitespace_cnt": _MAX_SPACE, **style}


def tags(tools: list[Tool], begin: Callable[[str], str], end: str, **style: str) -> Iterator[Format]:
    """One tag per tool; `begin` writes what comes before the arguments, from the tool's name."""
    for tool in tools:
        name = tool["function"]["name"]
        yield {"type": "tag", "begin": begin(name), "content": arguments_of(tool, **style), "end": end}


def json_tags(tools: list[Tool], before: str = "", after: str = "", key: str = "arguments") -> list[Format]:
    def begin(name: str) -> str:
        return f'{before}{{"name": {json.dumps(name)}, "{key}": '

    return list(tags(tools, begin, "}" + after))


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def optional(element: Format) -> Format:
    return {"type": "optional", "content": element}


def separated(calls: list[Format], separator: str, *, parallel: bool) -> Format:
    """One call or, in parallel, more."""
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def triggered(triggers: list[str], calls: list[Format], *, parallel: bool) -> Format:
    """Any text; what begins with a trigger is one of the calls. Without `parallel` the first ends the answer."""
    return {"type": "triggered_tags", "triggers": triggers, "tags": calls, "stop_after_first": not parallel}


def tagged_json(tools: list[Tool], mark: str, end: str, *, required: bool, parallel: bool) -> Format:
    """Each call a JSON object on a line of its own between two marks; without `required` after any text."""
    calls = json_tags(tools, f"{mark}\n", f"\n{end}")
    if required:
        return separated(calls, "\n", parallel=parallel)
    return triggered([mark], calls, parallel=parallel)


def lists(tools: list[Tool], calls: list[Format], *, parallel: bool) -> list[Format]:
    """Calls in brackets with commas between, as one tag for each call that may come first.

    All calls are written out in each tag: where they are many, and no tool is strict, the calls after the first are
    read but not constrained.
    """
    if parallel and len(calls) > _MAX_LISTED and not any(tool["function"].get("strict") for tool in tools):
        return [{**call, "begin": f"[{call['begin']}"} for call in calls]
    more = {"type": "star", "content": sequence(const(", "), {"type": "or", "elements": calls})}
    begun: list[Format] = []
    for call in calls:
        rest = [const(call["end"]), more] if parallel else [const(call["end"])]
        content = sequence(call["content"], *rest)
        begun.append({"type": "tag", "begin": f"[{call['begin']}", "content": content, "end": "]"})
    return begun


def listed(tools: list[Tool], mark: str, end: str, *, required: bool, parallel: bool) -> Format:
    """A JSON list of calls between two marks; without `required` after any text."""
    items = separated(json_tags(tools), ", ", parallel=parallel)
    block = {"type": "tag", "begin": f"{mark}[", "content": items, "end": f"]{end}"}
    return block if required else triggered([mark], [block], parallel=False)
