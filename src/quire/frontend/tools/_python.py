"""Calls in Python's spelling, name(key=value, …): how they are read, and their grammar.

Used by the pythonic formats, and for values that templates write with Python's own spelling. Literals are read as JSON
is, in their other spelling; nothing is evaluated.
"""

import json
import re
from typing import Any

from quire.frontend.parse import Emit, Malformed, Steps
from quire.frontend.tools import base
from quire.frontend.tools._named import arguments_of

_KEY = re.compile(r"\w+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "'\""}
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_ESCAPE_BEGUN = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ESCAPED |= {char: char for char in "/\\'\""}
WORDS = {"True": "true", "False": "false", "None": "null"}


class PythonValues(base.ToolParser):
    """Values may be Python's literals as well as JSON."""

    QUOTES = "'\""
    CLOSERS = {"{": "}", "[": "]", "(": ")"}

    def string(self, emit: Emit) -> Steps[None]:
        quote = yield from self.expect("'", '"')
        emit('"')
        while (char := (yield from self.peek())) != quote:
            if char == "\\":
                emit((yield from self._escape()))
            elif not char:
                raise Malformed
            else:  # line ends too, which Python would not take
                emit(base.quoted(self.read_run(_PLAIN[quote]) or self.read(1)))
        self.read(1)
        emit('"')

    def _escape(self) -> Steps[str]:
        while _ESCAPE_BEGUN.match(self._text, self._at) and not self._ended:
            yield
        text = self.read_run(_ESCAPE)
        if text[1:2] == "u":
            return text
        if text[1:2] in ("x", "U"):
            code = int(text[2:], 16)
            if code > 0x10FFFF:
                raise Malformed(text)
            return json.dumps(chr(code))[1:-1]
        if not text:
            raise Malformed
        return base.quoted(_ESCAPED.get(text[1], text))  # an unknown escape stays as it is written

    def scalar(self, text: str) -> str | None:
        return WORDS.get(text) or super().scalar(text)


class PythonCalls(PythonValues):
    def call(self) -> Steps[None]:
        name = yield from self.name()
        yield from self.expect("(")
        yield from self.space()
        before = "{"
        while not (yield from self.one_of(")")):
            key = yield from self._argument_name()
            if before == "{":
                self.begin_call(name)
            self.arguments(f'{before}"{key}": ')
            yield from self.space()
            yield from self.value(self.arguments)
            before = ", "
            yield from self.space()
            if (yield from self.expect(",", ")")) == ")":
                break
            yield from self.space()
        if before == "{":
            self.begin_call(name)
            self.arguments("{")
        self.arguments("}")
        self.end_call()

    def _argument_name(self) -> Steps[str]:
        key = ""
        while (yield from self.peek()) and (text := self.read_run(_KEY)):
            key += text
        yield from self.space()
        yield from self.expect("=")
        if not key:
            raise Malformed
        return key


def call_format(tool: base.Tool, required: bool) -> base.Format:
    """Arguments come in the schema's order, required ones first, their values as JSON, which is read as well."""
    arguments = arguments_of(tool, required, _KEY)
    if arguments.others is not None:
        argument = base.sequence({"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]*="}, _value(arguments.others))
        more = {"type": "star", "content": base.sequence(base.const(", "), argument)}
        content = base.optional(base.sequence(argument, more))
    else:
        written = {key: base.sequence(base.const(f"{key}="), _value(of)) for key, of in arguments.properties.items()}
        first = [written[key] for key in dict.fromkeys(arguments.required)]
        content = _with_commas(first, [written[key] for key in written if key not in arguments.required])
    return {"type": "tag", "begin": f"{tool['function']['name']}(", "content": content, "end": ")"}


def _value(schema: Any) -> base.Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _with_commas(first: list[base.Format], later: list[base.Format]) -> base.Format:
    """All of the first, any of the later ones in their order, with commas between."""
    if first:
        others = [base.sequence(base.const(", "), part) for part in first[1:]]
        optional = [base.optional(base.sequence(base.const(", "), part)) for part in later]
        return base.sequence(first[0], *others, *optional)
    ways = [_with_commas([part], later[idx + 1 :]) for idx, part in enumerate(later)]
    return {"type": "or", "elements": [base.const(""), *ways]}
