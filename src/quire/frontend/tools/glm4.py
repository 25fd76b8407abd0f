"""GLM 4.5 and later: <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>, a pair per argument.

Chosen by `tools.choose`, used by the server. A value is plain text or JSON, and only the tool's schema can tell: text
where the schema wants a string, else JSON if it is JSON of a type the schema names.
"""

import json
from collections.abc import Iterator
from typing import Any

from quire.frontend.parse import Malformed, Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base

MODEL_TYPES = ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa")
TEMPLATE_MARKS = ("<arg_key>",)
NEEDS_SPECIAL_TOKENS = True

_MARKS = StopStrings(("<tool_call>",))
_KEY_END = StopStrings(("</arg_key>",))
_VALUE_END = StopStrings(("</arg_value>",))
_TEXT_LIMITS = {"enum", "const", "pattern", "format", "$ref"}  # where space around a string is not part of it
_MAX_REFS = 8  # steps from a schema to what it refers to


class Parser(base.ToolParser):
    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        yield from self.expect("<tool_call>")
        yield from self.space()
        name = yield from self.name()
        yield from self.space()
        mark = yield from self.expect("<arg_key>", "</tool_call>")
        self.begin_call(name)
        self.arguments("{")
        separator = ""
        while mark == "<arg_key>":
            self.arguments(separator)
            yield from self._argument(self.tools[name].get("parameters") or {})
            separator = ", "
            yield from self.space()
            mark = yield from self.expect("<arg_key>", "</tool_call>")
        self.arguments("}")

    def _argument(self, schema: dict[str, Any]) -> Steps[None]:
        key = yield from self._text_until(_KEY_END)
        self.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        yield from self.space()
        yield from self.expect("<arg_value>")
        argument = _argument_schema(schema, key)
        types = set(_types(schema, argument))
        if types == {"string"} and _TEXT_LIMITS.isdisjoint(argument):
            self.arguments('"')
            yield from self.until(_VALUE_END, lambda text: self.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
            yield from self.expect("</arg_value>")
            self.arguments('"')
        else:
            words = (yield from self._json_or_text()).strip()
            self.arguments(words if _is_value(words, types) else json.dumps(words, ensure_ascii=False))

    def _json_or_text(self) -> Steps[str]:
        """A value's text; a closing tag in a string of JSON does not end it."""
        read: list[str] = []
        self._kept = read
        try:
            yield from self.space()
            if (yield from self.peek()) in ("{", "["):
                yield from self.value(lambda text: None)
                yield from self.space()
                yield from self.expect("</arg_value>")
                return "".join(read).removesuffix("</arg_value>")
        except Malformed:
            pass
        finally:
            self._kept = None
        self.unread("".join(read))
        return (yield from self._text_until(_VALUE_END))

    def _text_until(self, end: StopStrings) -> Steps[str]:
        pieces: list[str] = []
        mark = yield from self.until(end, pieces.append)
        if not mark:
            raise Malformed("".join(pieces))
        self.read(len(mark))
        return "".join(pieces)


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
        values = [schema["const"]] if "const" in schema else schema["enum"]
        yield from (_TYPE_NAMES.get(type(value), "null") for value in values)
    elif isinstance(reference := schema.get("$ref"), str):
        yield from _types(root, _referred(root, reference), num_refs + 1)
    else:
        for option in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
            yield from _types(root, option, num_refs + 1)


_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _referred(root: dict[str, Any], reference: str) -> Any:
    place: Any = root
    for part in reference.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, dict) else None
    return place


def _is_value(text: str, types: set[str]) -> bool:
    """Whether a value's text is JSON of one of the types; strings are written plain, so quotes belong to them."""
    is_json = not text.startswith('"') and base.is_json(text)
    if not is_json:
        return False
    kinds = {"{": {"object"}, "[": {"array"}, "t": {"boolean"}, "f": {"boolean"}, "n": {"null"}}
    return not types or bool(types & kinds.get(text[0], {"number", "integer"}))


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    calls = list(base.tags(tools, lambda name: f"<tool_call>{name}", "</tool_call>", style="glm_xml"))
    if required:
        return base.separated(calls, "\n", parallel=parallel)
    return base.triggered(["<tool_call>"], calls, parallel=parallel)
