"""Pythonic calls: [name(key=value, …), …] with Python literals, bare (Llama 3.2, 4) or between marks (Llama 4, LFM2).

Chosen by `tools.choose`, used by the server. Literals are read as JSON is, in their other spelling; nothing is
evaluated. A bare bracket begins a call only before a tool's name, a parenthesis and an argument's name.
"""

import json
import re
from typing import Any

from quire.errors import RequestError
from quire.frontend.parse import Emit, Malformed, Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base

MODEL_TYPES = ("llama4", "lfm2", "lfm2_moe")
TEMPLATE_MARKS = ("<|tool_call_start|>[", "[func_name1(params_name1=params_value1")
NEEDS_SPECIAL_TOKENS = True

_OPENERS = ("<|python_start|>", "<|tool_call_start|>")
_CLOSERS = ("<|python_end|>", "<|tool_call_end|>")
_MARKS = StopStrings((*_OPENERS, "["))
_KEY = re.compile(r"\w+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "'\""}
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_ESCAPE_BEGUN = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "", "/": "/"}
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Parser(base.ToolParser):
    QUOTES = "'\""
    CLOSERS = {"{": "}", "[": "]", "(": ")"}

    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._list())

    def _list(self) -> Steps[None]:
        yield from self.one_of(*_OPENERS)
        yield from self.space()
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self._call()
            yield from self.space()
            if (yield from self.expect(",", "]")) == "]":
                break
        yield from self.space()
        yield from self.one_of(*_CLOSERS)

    def _call(self) -> Steps[None]:
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
        while (yield from self.peek()) and (text := self.take_run(_KEY)):
            key += text
        yield from self.space()
        yield from self.expect("=")
        if not key:
            raise Malformed
        return key

    def string(self, emit: Emit) -> Steps[None]:
        quote = yield from self.expect("'", '"')
        emit('"')
        while (char := (yield from self.peek())) != quote:
            if char == "\\":
                emit((yield from self._escape()))
            elif not char:
                raise Malformed
            else:  # line ends too, which Python would not take
                emit(_quoted(self.take_run(_PLAIN[quote]) or self.take(1)))
        self.take(1)
        emit('"')

    def _escape(self) -> Steps[str]:
        while _ESCAPE_BEGUN.match(self._text, self._at) and not self._ended:
            yield
        text = self.take_run(_ESCAPE)
        if text[1:2] == "u":
            return text
        if text[1:2] in ("x", "U"):
            code = int(text[2:], 16)
            if code > 0x10FFFF:
                raise Malformed(text)
            return json.dumps(chr(code))[1:-1]
        if not text:
            raise Malformed
        return _quoted(_ESCAPED.get(text[1], text[1] if text[1] in "\\'\"" else text))

    def scalar(self, text: str) -> str | None:
        return _WORDS.get(text) or super().scalar(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Root keywords of a schema that a list of named arguments cannot honour.
_UNSUPPORTED = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "const", "enum", "unevaluatedProperties",
)  # fmt: skip


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """Arguments come in the schema's order, required ones first, their values as JSON, which this format reads too.

    Only properties that the schema names are written, or any where it names none.
    """
    calls = [_call_format(tool) for tool in tools]
    items = base.separated(calls, ", ", parallel=parallel)
    if required:
        return {"type": "tag", "begin": "[", "content": items, "end": "]"}
    more = {"type": "star", "content": base.sequence(base.const(", "), {"type": "or", "elements": calls})}
    rest = [base.const(")"), more] if parallel else [base.const(")")]
    lists = [
        {"type": "tag", "begin": f"[{call['begin']}", "content": base.sequence(call["content"], *rest), "end": "]"}
        for call in calls
    ]
    return base.triggered([begun["begin"] for begun in lists], lists, parallel=False)


def _call_format(tool: base.Tool) -> base.Format:
    name, schema = tool["function"]["name"], base.schema_of(tool)
    for keyword in _UNSUPPORTED:
        if keyword in schema:
            raise RequestError(
                f"the parameters of tool {name} have {keyword!r}, which pythonic tool calls cannot honour."
            )
    return {"type": "tag", "begin": f"{name}(", "content": _arguments_format(name, schema), "end": ")"}


def _arguments_format(name: str, schema: dict[str, Any]) -> base.Format:
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, needed = schema.get("properties") or {}, schema.get("required") or []
    if not properties and not needed and schema.get("additionalProperties", True) is not False:
        any_argument = base.sequence({"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]*="}, _json(True))
        more = {"type": "star", "content": base.sequence(base.const(", "), any_argument)}
        return {"type": "optional", "content": base.sequence(any_argument, more)}
    for key in [*properties, *needed]:
        if not _KEY.fullmatch(key):
            raise RequestError(f"the parameter {key!r:.80} of tool {name} is no word, which pythonic tool calls need.")
    arguments = {
        key: base.sequence(base.const(f"{key}="), _json({**value, **shared} if isinstance(value, dict) else value))
        for key, value in ({key: True for key in needed} | properties).items()
    }
    first = [arguments[key] for key in needed]
    later = [argument for key, argument in arguments.items() if key not in needed]
    return _with_commas(first, later)


def _with_commas(first: list[base.Format], later: list[base.Format]) -> base.Format:
    """All of the first, any of the later ones in their order, with commas between."""
    if first:
        parts = [first[0], *(base.sequence(base.const(", "), part) for part in first[1:])]
        return base.sequence(
            *parts, *({"type": "optional", "content": base.sequence(base.const(", "), p)} for p in later)
        )
    ways = [_with_commas([part], later[idx + 1 :]) for idx, part in enumerate(later)]
    return {"type": "or", "elements": [base.const(""), *ways]}


def _json(schema: Any) -> base.Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
