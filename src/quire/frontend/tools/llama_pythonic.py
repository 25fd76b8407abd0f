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
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ESCAPED |= {char: char for char in "/\\'\""}
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
        while (yield from self.peek()) and (text := self.read_run(_KEY)):
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
                emit(_quoted(self.read_run(_PLAIN[quote]) or self.read(1)))
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
        return _quoted(_ESCAPED.get(text[1], text))  # an unknown escape stays as it is written

    def scalar(self, text: str) -> str | None:
        return _WORDS.get(text) or super().scalar(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Root keywords of a schema that a list of named arguments cannot honour.
_UNSUPPORTED = tuple(
    """
    $ref allOf anyOf oneOf not if patternProperties propertyNames minProperties maxProperties
    dependentRequired dependentSchemas dependencies const enum unevaluatedProperties
    """.split()
)
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """Arguments come in the schema's order, required ones first, their values as JSON, which this format reads too.

    Only properties that the schema names are written, or any where it names none. A schema that cannot be honoured is
    refused where a call is required or the tool strict, else its arguments are free.
    """
    calls = [_call_format(tool, required) for tool in tools]
    if required:
        return {"type": "tag", "begin": "[", "content": base.separated(calls, ", ", parallel=parallel), "end": "]"}
    more = {"type": "star", "content": base.sequence(base.const(", "), {"type": "or", "elements": calls})}
    rest = [base.const(")"), more] if parallel else [base.const(")")]
    lists: list[base.Format] = [
        {"type": "tag", "begin": f"[{call['begin']}", "content": base.sequence(call["content"], *rest), "end": "]"}
        for call in calls
    ]
    return base.triggered([begun["begin"] for begun in lists], lists, parallel=False)


def _call_format(tool: base.Tool, required: bool) -> base.Format:
    name, schema = tool["function"]["name"], base.schema_of(tool)
    if (trouble := _trouble(schema)) is not None:
        if required or tool["function"].get("strict"):
            raise RequestError(f"the parameters of the tool {name} have {trouble}, which pythonic calls cannot honour.")
        schema = {}
    return {"type": "tag", "begin": f"{name}(", "content": _arguments_format(schema), "end": ")"}


def _trouble(schema: dict[str, Any]) -> str | None:
    """What named arguments cannot honour."""
    for keyword in _UNSUPPORTED:
        if keyword in schema:
            return keyword
    if _OTHER_REFERENCE.search(json.dumps(schema)):
        return "a $ref to other places than $defs"
    keys = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
    return next((f"the name {key!r:.80}" for key in keys if not _KEY.fullmatch(key)), None)


def _arguments_format(schema: dict[str, Any]) -> base.Format:
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def value(argument: Any) -> base.Format:
        argument = {**argument, **shared} if isinstance(argument, dict) else argument
        return {"type": "json_schema", "json_schema": argument, "max_whitespace_cnt": 1}

    others = schema.get("additionalProperties", True)
    needed = dict.fromkeys(schema.get("required") or (), others)
    properties = needed | (schema.get("properties") or {})
    if not properties and others is not False:
        argument = base.sequence({"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]*="}, value(others))
        more = {"type": "star", "content": base.sequence(base.const(", "), argument)}
        return {"type": "optional", "content": base.sequence(argument, more)}
    arguments = {key: base.sequence(base.const(f"{key}="), value(argument)) for key, argument in properties.items()}
    return _with_commas([arguments[key] for key in needed], [arguments[key] for key in arguments if key not in needed])


def _with_commas(first: list[base.Format], later: list[base.Format]) -> base.Format:
    """All of the first, any of the later ones in their order, with commas between."""
    if first:
        others = [base.sequence(base.const(", "), part) for part in first[1:]]
        optional = [{"type": "optional", "content": base.sequence(base.const(", "), part)} for part in later]
        return base.sequence(first[0], *others, *optional)
    ways = [_with_commas([part], later[idx + 1 :]) for idx, part in enumerate(later)]
    return {"type": "or", "elements": [base.const(""), *ways]}
