"""Calls made of tags, with a pair of tags around each argument: how they are read, and their grammar.

Used by the formats that only differ in their tags (qwen3_coder, seed_oss, minimax_m2, glm4, hy_v3). A value between
tags has no type: it is text or JSON, and only the tool's schema can tell. It is text where the schema wants a string,
else JSON (or Python's spelling of it, which some templates write) if it is that and of a type the schema names.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.frontend.parse import Malformed, Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base
from quire.frontend.tools._named import arguments_of
from quire.frontend.tools._python import PythonValues

_MAX_REFS = 8  # steps from a schema to what it refers to
_SPACE = " \t\r\n"
_TEXT_LIMITS = {"enum", "const", "pattern", "format", "$ref"}  # where space around a string is not part of it
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NAMES = re.compile(r"""[^<>"'\s]+""")
_FREE = {"type", "title", "description", "default", "examples", "deprecated", "$defs", "definitions"}  # limit nothing
_LENGTHS = {"minLength", "maxLength"}
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Tags:
    """<block><call>name<name_end> <key>key<key_end><value>…<value_end> … <call_end><block_end>"""

    call: str
    call_end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""
    name_end: str = ""
    block: str = ""
    block_end: str = ""
    holds_several: bool = False  # a block: else there is one around each call
    has_lines: bool = False  # a value stands on lines of its own: the line ends around it are not part of it
    may_join: bool = False  # some models of the format write no line ends between tags


class TaggedCalls(PythonValues):
    """A model may leave out the block's tags. Space between tags is free."""

    TAGS: Tags

    def __init__(self, tools: list[base.Tool]) -> None:
        tags = self.TAGS
        self._marks = StopStrings([mark for mark in (tags.block, tags.call) if mark])
        self._key_end = StopStrings([tags.key_end])
        ends = [f"\n{tags.value_end}", tags.value_end] if tags.has_lines else [tags.value_end]
        self._value_end = StopStrings(ends)
        super().__init__(tools)

    def run(self) -> Steps[None]:
        while (yield from self.until(self._marks, self.content)):
            yield from self.attempt(self._calls_between())

    def _calls_between(self) -> Steps[None]:
        tags = self.TAGS
        yield from self.one_of(tags.block)
        yield from self.space()
        yield from self.expect(tags.call)
        while True:
            yield from self._call()
            yield from self.space()
            if tags.block and (yield from self.one_of(tags.block_end)):
                return
            if not (yield from self.one_of(tags.call)):
                return

    def _call(self) -> Steps[None]:
        tags = self.TAGS
        yield from self.space()
        name = yield from self.name()
        yield from self.space()
        if tags.name_end:
            yield from self.expect(tags.name_end)
            yield from self.space()
        mark = yield from self.expect(tags.key, tags.call_end)
        self.begin_call(name)
        self.arguments("{")
        separator = ""
        while mark == tags.key:
            self.arguments(separator)
            yield from self._argument(self.tools[name].get("parameters") or {})
            separator = ", "
            yield from self.space()
            mark = yield from self.expect(tags.key, tags.call_end)
        self.arguments("}")
        self.end_call()

    def _argument(self, schema: dict[str, Any]) -> Steps[None]:
        tags = self.TAGS
        key = yield from self._text_until(self._key_end)
        self.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        if tags.value:
            yield from self.space()
            yield from self.expect(tags.value)
        if tags.has_lines:
            yield from self.one_of("\n")
        argument = _argument_schema(schema, key)
        types = set(_types(schema, argument))
        if _is_exact(types, argument):
            self.arguments('"')
            mark = yield from self.until(self._value_end, lambda text: self.arguments(base.quoted(text)))
            if not mark:
                raise Malformed
            self.read(len(mark))
            self.arguments('"')
        else:
            self.arguments((yield from self._untyped(types)))

    def _untyped(self, types: set[str]) -> Steps[str]:
        """A value as JSON. A closing tag in a string of JSON does not end it."""
        read: list[str] = []
        self._kept = read
        try:
            yield from self.space()
            kind = {"{": "object", "[": "array"}.get((yield from self.peek()))
            if kind is not None and (not types or kind in types):
                pieces: list[str] = []
                yield from self.value(pieces.append)
                yield from self.space()
                yield from self.expect(self.TAGS.value_end)
                return "".join(pieces)
        except Malformed:
            pass
        finally:
            self._kept = None
        self.unread("".join(read))
        text = (yield from self._text_until(self._value_end)).strip(_SPACE)
        return self._scalar_of(text, types) or json.dumps(text, ensure_ascii=False)

    def _scalar_of(self, text: str, types: set[str]) -> str | None:
        """A number or a word as JSON, if the types allow it. Strings are written plain, so quotes belong to them."""
        spelled = self.scalar(text) if len(text) <= base.MAX_SCALAR_CHARS else None
        if spelled is None:
            return None
        kinds = {"t": {"boolean"}, "f": {"boolean"}, "n": {"null"}}.get(spelled[0], {"number", "integer"})
        if "string" in types and not _INTEGER.fullmatch(spelled):
            kinds = kinds - {"integer"}
        return spelled if not types or types & kinds else None

    def _text_until(self, end: StopStrings) -> Steps[str]:
        pieces: list[str] = []
        mark = yield from self.until(end, pieces.append)
        if not mark:  # cut short: a string without its end cannot be taken for a value
            self.arguments(f'"{base.quoted("".join(pieces))}')
            raise Malformed
        self.read(len(mark))
        return "".join(pieces)


# What a schema says about one argument


def _argument_schema(schema: dict[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def _types(root: dict[str, Any], schema: Any, num_refs: int = 0) -> Iterator[str]:
    """The JSON types a schema names; none if it takes any."""
    if not isinstance(schema, dict) or num_refs > _MAX_REFS:
        return
    if isinstance(named := schema.get("type"), str):
        yield named
    elif isinstance(named, list):
        yield from (name for name in named if isinstance(name, str))
    elif "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else _listed(schema, "enum")
        yield from (_TYPE_NAMES.get(type(value), "null") for value in values)
    elif isinstance(reference := schema.get("$ref"), str):
        yield from _types(root, _referred(root, reference), num_refs + 1)
    elif len(parts := _listed(schema, "allOf")) == 1:
        yield from _types(root, parts[0], num_refs + 1)
    else:
        for option in _listed(schema, "anyOf") + _listed(schema, "oneOf"):
            yield from _types(root, option, num_refs + 1)


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _referred(root: dict[str, Any], reference: str) -> Any:
    place: Any = root
    for part in reference.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, dict) else None
    return place


def _is_exact(types: set[str], schema: Any) -> bool:
    """Whether a value is a string to the letter."""
    return types == {"string"} and _TEXT_LIMITS.isdisjoint(schema)


# The grammar

_LINE_END = base.optional(base.const("\n"))


def tagged_structure(tags: Tags, tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    calls = [_call_format(tags, tool, required) for tool in tools]
    if tags.holds_several:
        several = base.separated(calls, "\n", parallel=parallel)
        block = {"type": "tag", "begin": f"{tags.block}\n", "content": several, "end": f"\n{tags.block_end}"}
        return block if required else base.triggered([tags.block], [block], parallel=False)
    if tags.block:
        calls = [
            {**call, "begin": f"{tags.block}\n{call['begin']}", "end": f"{call['end']}\n{tags.block_end}"}
            for call in calls
        ]
    if required:  # some models write no line ends between calls
        calls = [{**call, "end": [call["end"], f"{call['end']}\n"]} for call in calls]
        return base.separated(calls, "", parallel=parallel)
    return base.triggered([tags.block or tags.call], calls, parallel=parallel)


def _call_format(tags: Tags, tool: base.Tool, required: bool) -> base.Format:
    """Arguments come in the schema's order."""
    arguments = arguments_of(tool, required, _NAMES)
    begin = f"{tags.call}{tool['function']['name']}{tags.name_end}"
    parts = [] if not tags.may_join else [_LINE_END]
    if arguments.others is not None:
        name = {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_.\\-]*"}
        argument = base.sequence(base.const(tags.key), name, _argument_format(tags, "", arguments.others))
        parts.append({"type": "star", "content": argument})
    for key, schema in arguments.properties.items():
        part = _argument_format(tags, f"{tags.key}{key}", schema)
        parts.append(part if key in arguments.required else base.optional(part))
    content = base.sequence(*parts) if parts else base.const("")
    line_end = "" if tags.may_join else "\n"
    return {"type": "tag", "begin": f"{begin}{line_end}", "content": content, "end": tags.call_end}


def _argument_format(tags: Tags, begin: str, schema: Any) -> base.Format:
    """An argument after what `begin` says of it."""
    line_end = "\n" if tags.has_lines else ""
    value = _value_format(schema, tags.value_end)
    end = f"{line_end}{tags.value_end}"
    if tags.may_join:
        tag = {"type": "tag", "begin": f"{tags.value}{line_end}", "content": value, "end": end}
        return base.sequence(base.const(f"{begin}{tags.key_end}"), _LINE_END, tag, _LINE_END)
    between = f"\n{tags.value}" if tags.value else ""
    begin = f"{begin}{tags.key_end}{between}{line_end}"
    return {"type": "tag", "begin": begin, "content": value, "end": f"{end}\n"}


def _value_format(schema: Any, end: str) -> base.Format:
    types = set(_types(schema, schema)) if isinstance(schema, dict) else set()
    if types and "string" not in types:
        return {"type": "json_schema", "json_schema": schema}
    if _is_free(schema):
        return {"type": "any_text", "excludes": [end]}
    if types == {"string"} and schema.keys() <= _FREE | _LENGTHS:
        return _text_format(schema, end)
    no_string = "|".join(_no_strings(schema, types, end))
    return {"type": "json_schema", "json_schema": schema, "style": "untyped", "no_string": no_string}


def _is_free(schema: Any) -> bool:
    """Whether every text between the tags is a value that the schema takes."""
    if not isinstance(schema, dict):
        return schema is not False
    return schema.keys() <= _FREE | {"anyOf"} and all(map(_is_free, _listed(schema, "anyOf")))


def _text_format(schema: dict[str, Any], end: str) -> base.Format:
    """A string between two lengths. An engine counts faster than an automaton that looks for the end as well does."""
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(low, int) or not isinstance(high, int | None) or low > (low if high is None else high):
        return {"type": "json_schema", "json_schema": schema}  # which refuses it
    rest: base.Format = {"type": "any_text", "excludes": [end]}
    if high is not None:
        rest["max_chars"] = high - low
    return base.sequence({"type": "regex", "pattern": f"[^<]{{{low}}}"}, rest) if low > 0 else rest


def _no_strings(schema: Any, types: set[str], end: str) -> Iterator[str]:
    """Patterns of the texts that the parser does not read as strings, or not to the letter."""
    counts = any(keyword in json.dumps(schema) for keyword in _LENGTHS)
    yield rf"[\s\S]*{'<' if counts else re.escape(end)}[\s\S]*"  # a product of both would have too many states
    if _is_exact(types, schema):
        return
    yield r"[ \t\r\n][\s\S]*|[\s\S]*[ \t\r\n]"
    any_type = not types
    if any_type or "null" in types:
        yield "null|None"
    if any_type or "boolean" in types:
        yield "true|false|True|False"
    if any_type or types & {"number", "integer"}:
        yield r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?"
    if any_type or types & {"array", "object"}:
        yield r"[\[{][\s\S]*"
