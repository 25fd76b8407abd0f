"""JSON schemas (2020-12 and draft-07) worked out into alternatives that allow no value the schema forbids.

Called by `json_grammar.py` for one goal after another. `expand(schema, True)` gives values that satisfy the schema and
`expand(schema, False)` values that violate it. Both may leave out some of them (and refuse the schema where that
matters), but never include others, so whatever is built from them is sound. Must not know grammars.
"""

from dataclasses import replace
from typing import Any

from quire.errors import RequestError
from quire.structured.grammars.alternatives import (
    NOTHING_ASKED,
    Alternative,
    Array,
    Goal,
    Object,
    Rest,
    product,
)
from quire.structured.grammars.document import Document, Subschema
from quire.structured.grammars.keywords import Alternatives, Positive
from quire.structured.grammars.regular import NONE, Node, finite
from quire.structured.grammars.violations import Negative


class Schema:
    def __init__(self, text: str) -> None:
        self.document = Document(text)
        self._expanded: dict[tuple[Subschema, bool], Alternatives | None] = {}
        self._goals: dict[Goal, Alternatives] = {}

    @property
    def root(self) -> Goal:
        return frozenset({(self.document.root, True)})

    def alternatives(self, goal: Goal) -> Alternatives:
        if goal not in self._goals:
            parts = []
            for place, holds in sorted(goal, key=lambda literal: (literal[0].order, literal[1])):
                parts.append([alternative.unseen() for alternative in self.expand(place, holds)])
            self._goals[goal] = product(parts)
        return self._goals[goal]

    def expand(self, place: Subschema, holds: bool) -> Alternatives:
        key = (place, holds)
        if key not in self._expanded:
            self._expanded[key] = None  # being worked out
            self._expanded[key] = self._work_out(place, holds)
        result = self._expanded[key]
        if result is None:
            raise RequestError("$ref leads back to itself without a property or item in between: remove the loop.")
        return result

    def _work_out(self, place: Subschema, holds: bool) -> Alternatives:
        schema = place.schema
        if isinstance(schema, bool):
            return [Alternative()] if schema == holds else []
        if "$ref" in schema and self.document.is_old:
            schema = {"$ref": schema["$ref"]}
        keywords = (Positive if holds else Negative)(self, place, schema)
        meanings = [keywords.keyword(name, value) for name, value in schema.items()]
        parts = [alternatives for alternatives in meanings if alternatives is not None]
        if not holds:
            return [alternative for part in parts for alternative in part]
        return [self._unevaluated(place, schema, alternative) for alternative in product(parts)]

    def _unevaluated(self, place: Subschema, schema: dict, alternative: Alternative) -> Alternative:
        seen = alternative.seen
        if "unevaluatedProperties" in schema and not seen.all_properties:
            rest = Rest(seen.names, seen.patterns, self.goal(schema["unevaluatedProperties"], place))
            alternative = replace(alternative, object=alternative.object.merge(Object(rest=(rest,))))
            alternative = replace(alternative, seen=replace(alternative.seen, all_properties=True))
        if "unevaluatedItems" in schema and not seen.all_items:
            prefix = (NOTHING_ASKED,) * seen.items
            array = Array(prefix, self.goal(schema["unevaluatedItems"], place), open=False)
            alternative = replace(alternative, array=alternative.array.merge(array))
            alternative = replace(alternative, seen=replace(alternative.seen, all_items=True))
        return alternative

    def are_apart(self, a: Alternative, b: Alternative) -> bool:
        """Whether two alternatives share no value, as far as a look at constants and required properties tells."""
        merged = a.merge(b)
        if merged is None:
            return True
        if merged.kinds & {"null", "true", "false", "array"} or not _has_no_scalar(merged):
            return False
        if "object" not in merged.kinds:
            return True
        return any(self._is_void(merged.object, name) for name in merged.object.required)

    def _is_void(self, shape: Object, name: str) -> bool:
        """Whether no value is left for a required property."""
        goal = shape.properties.get(name, NOTHING_ASKED)
        if not goal or not all(_is_scalar(place.schema) for place, _ in goal):
            return False
        alternatives = self.alternatives(goal)
        return all(each.kinds <= {"string", "number"} and _has_no_scalar(each) for each in alternatives)

    def goal(self, schema: Any, near: Subschema, holds: bool = True) -> Goal:
        place = self.document.place(schema, near)
        if isinstance(place.schema, bool) or not place.schema:
            satisfiable = place.schema is not False
            return NOTHING_ASKED if satisfiable == holds else frozenset({(self.document.never, True)})
        return frozenset({(place, holds)})


def _is_scalar(schema: Any) -> bool:
    return isinstance(schema, dict) and ("const" in schema or "enum" in schema) and "$ref" not in schema


def _has_no_scalar(alternative: Alternative) -> bool:
    """Whether no string and no number is left, as far as a look at constants tells."""
    has_string = "string" in alternative.kinds and not _is_void(alternative.string)
    has_number = "number" in alternative.kinds and not _is_void(alternative.number)
    return not has_string and not has_number


def _is_void(node: Node | None) -> bool:
    """Whether the language is plainly empty: an intersection of lists of words that have none in common."""
    if node is None or node.kind != "and":
        return node is NONE
    listed = [finite(part) for part in node.args]
    words = [set(found) for found in listed if found is not None]
    return len(words) == len(listed) and not set.intersection(*words)
