"""JSON Schema's keywords (2020-12 and draft-07) worked out into alternatives that allow no value the schema forbids.

Called by `json_grammar.py` for one goal after another. `expand(schema, True)` gives values that satisfy the schema and
`expand(schema, False)` values that violate it. Both may leave out some of them (and refuse the schema where that
matters), but never include others, so whatever is built from them is sound. Must not know grammars.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from quire.errors import RequestError
from quire.structured.grammars import formats, numbers
from quire.structured.grammars.alternatives import (
    KINDS,
    NOTHING_ASKED,
    Alternative,
    Array,
    Contains,
    Goal,
    Object,
    Rest,
    Seen,
    product,
)
from quire.structured.grammars.document import Document, Subschema
from quire.structured.grammars.pattern import found_in
from quire.structured.grammars.regular import ANYTHING, CHAR, NONE, Node, either, finite, no, repeat, text
from quire.structured.spec import MAX_COUNT, REFUSED_FORMATS

_TYPES = {"null": {"null"}, "boolean": {"true", "false"}, "number": {"number"}, "integer": {"number"}}
_TYPES |= {"string": {"string"}, "array": {"array"}, "object": {"object"}}
Alternatives = list[Alternative]


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
            literals = sorted(goal, key=lambda literal: (literal[0].order, literal[1]))
            self._goals[goal] = product([_unseen(self.expand(*literal)) for literal in literals])
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
        keywords = (_Positive if holds else _Negative)(self, place, schema)
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


def _unseen(alternatives: Alternatives) -> Alternatives:
    return [alternative.unseen() for alternative in alternatives]


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


class _Keywords:
    """What one schema's keywords mean; `keyword` gives None for those that assert nothing."""

    HANDLERS: dict[str, str] = {}

    def __init__(self, owner: Schema, place: Subschema, schema: dict) -> None:
        self.owner = owner
        self.place = place
        self.schema = schema

    def keyword(self, name: str, value: Any) -> Alternatives | None:
        handler: Callable[[Any], Alternatives | None] | None = getattr(self, self.HANDLERS.get(name, ""), None)
        return handler(value) if handler else None

    def sub(self, schema: Any, holds: bool = True) -> Alternatives:
        return self.owner.expand(self.owner.document.place(schema, self.place), holds)

    def goal(self, schema: Any, holds: bool = True) -> Goal:
        return self.owner.goal(schema, self.place, holds)

    def names(self) -> frozenset[str]:
        return frozenset(_mapping("properties", self.schema.get("properties", {})))

    def name_patterns(self) -> tuple[Node, ...]:
        return tuple(map(found_in, _mapping("patternProperties", self.schema.get("patternProperties", {}))))

    def tuple_length(self) -> int:
        prefix = self.schema.get("prefixItems", self.schema.get("items"))
        return len(prefix) if isinstance(prefix, list) else 0

    def contains_counts(self) -> tuple[int, int | None]:
        low, high = self.schema.get("minContains", 1), self.schema.get("maxContains")
        return _count("minContains", low), None if high is None else _count("maxContains", high)

    def branches(self, value: Any) -> tuple[Any, Any, Any]:
        return value, self.schema.get("then", True), self.schema.get("else", True)

    def multiple(self, value: Any) -> int | Decimal:
        return _number("multipleOf", value)


def _object(**fields: Any) -> Alternative:
    return Alternative(object=Object(**fields))


class _Positive(_Keywords):
    def ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow(value, self.place), True)

    def dynamic_ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow_dynamic(value, self.place), True)

    def type(self, value: Any) -> Alternatives:
        names = _type_names(value)
        kinds = frozenset().union(*(_TYPES[name] for name in names))
        whole = "integer" in names and "number" not in names
        return [Alternative(kinds, number=numbers.INTEGER if whole else None)]

    def const(self, value: Any) -> Alternatives:
        return self.enum([value])

    def enum(self, value: Any) -> Alternatives:
        kinds, texts, spellings, deep = _sorted_values(_list("enum", value))
        result = [Alternative(kinds)] if kinds else []
        if texts:
            result.append(Alternative(frozenset({"string"}), string=texts))
        if spellings:
            result.append(Alternative(frozenset({"number"}), number=spellings))
        for item in deep:
            result += self.owner.expand(self.owner.document.made(_exactly(item)), True)
        return result

    def all_of(self, value: Any) -> Alternatives:
        return product([self.sub(schema) for schema in _schemas("allOf", value)])

    def any_of(self, value: Any) -> Alternatives:
        return [alternative for schema in _schemas("anyOf", value) for alternative in self.sub(schema)]

    def one_of(self, value: Any) -> Alternatives:
        result: Alternatives = []
        options = _schemas("oneOf", value)
        for idx, chosen in enumerate(options):
            others = options[:idx] + options[idx + 1 :]
            for alternative in self.sub(chosen):
                excluded = [schema for schema in others if not self._is_apart(alternative, schema)]
                result += product([[alternative], *map(self.not_, excluded)])
        return result

    def _is_apart(self, alternative: Alternative, schema: Any) -> bool:
        """Plainly shares no value with the schema, as branches with different constants: no need to exclude it."""
        return all(self.owner.are_apart(alternative, other) for other in self.sub(schema))

    def not_(self, value: Any) -> Alternatives:
        return _unseen(self.sub(value, False))

    def if_(self, value: Any) -> Alternatives:
        test, then, otherwise = self.branches(value)
        return product([self.sub(test), self.sub(then)]) + product([self.not_(test), self.sub(otherwise)])

    def minimum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_least(_number("minimum", value)))]

    def maximum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_most(_number("maximum", value)))]

    def exclusive_minimum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_least(_number("exclusiveMinimum", value), strict=True))]

    def exclusive_maximum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_most(_number("exclusiveMaximum", value), strict=True))]

    def multiple_of(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.multiple_of(self.multiple(value)))]

    def min_length(self, value: Any) -> Alternatives:
        return [Alternative(string=repeat(CHAR, _count("minLength", value), None))]

    def max_length(self, value: Any) -> Alternatives:
        return [Alternative(string=repeat(CHAR, 0, _count("maxLength", value, capped=True)))]

    def pattern(self, value: Any) -> Alternatives:
        return [Alternative(string=found_in(_text("pattern", value)))]

    def format(self, value: Any) -> Alternatives | None:
        value = _text("format", value)
        if value in REFUSED_FORMATS:
            raise RequestError(f"format {value!r} is not supported: remove it, or use pattern.")
        return [Alternative(string=formats.language(value))] if value in formats.HONOURED else None

    def prefix_items(self, value: Any) -> Alternatives:
        prefix = tuple(map(self.goal, _schemas("prefixItems", value, allow_empty=True)))
        return [Alternative(array=Array(prefix), seen=Seen(items=len(prefix)))]

    def items(self, value: Any) -> Alternatives:
        if isinstance(value, list):  # as written before 2020-12
            return self.prefix_items(value)
        prefix = (NOTHING_ASKED,) * self.tuple_length()
        return [Alternative(array=Array(prefix, self.goal(value), open=False), seen=Seen(all_items=True))]

    def additional_items(self, value: Any) -> Alternatives | None:
        return self.items(value) if isinstance(self.schema.get("items"), list) else None

    def min_items(self, value: Any) -> Alternatives:
        return [Alternative(array=Array(low=_count("minItems", value)))]

    def max_items(self, value: Any) -> Alternatives:
        return [Alternative(array=Array(high=_count("maxItems", value, capped=True)))]

    def unique_items(self, value: Any) -> Alternatives | None:
        return [Alternative(array=Array(unique=True))] if value is True else None

    def contains(self, value: Any) -> Alternatives:
        contains = Contains(self.goal(value), self.goal(value, False), *self.contains_counts())
        return [Alternative(array=Array(contains=(contains,)))]

    def properties(self, value: Any) -> Alternatives:
        goals = {name: self.goal(schema) for name, schema in _mapping("properties", value).items()}
        return [Alternative(object=Object(properties=goals), seen=Seen(names=frozenset(goals)))]

    def pattern_properties(self, value: Any) -> Alternatives:
        goals = {pattern: self.goal(schema) for pattern, schema in _mapping("patternProperties", value).items()}
        patterns = tuple((found_in(pattern), goal) for pattern, goal in goals.items())
        seen = Seen(patterns=tuple(node for node, _ in patterns))
        return [Alternative(object=Object(patterns=patterns), seen=seen)]

    def additional_properties(self, value: Any) -> Alternatives:
        rest = Rest(self.names(), self.name_patterns(), self.goal(value))
        return [Alternative(object=Object(rest=(rest,)), seen=Seen(all_properties=True))]

    def property_names(self, value: Any) -> Alternatives:
        allowed = [alternative for alternative in self.sub(value) if "string" in alternative.kinds]
        strings = [alternative.string or ANYTHING for alternative in allowed]
        return [_object(names=(either(*strings),))]

    def required(self, value: Any) -> Alternatives:
        return [_object(required=tuple(_strings("required", value)))]

    def min_properties(self, value: Any) -> Alternatives:
        return [_object(low=_count("minProperties", value))]

    def max_properties(self, value: Any) -> Alternatives:
        return [_object(high=_count("maxProperties", value, capped=True))]

    def dependent_required(self, value: Any) -> Alternatives:
        parts = []
        for name, needed in _mapping("dependentRequired", value).items():
            parts.append([self._lacks(name), _object(required=(name, *_strings("dependentRequired", needed)))])
        return product(parts)

    def dependent_schemas(self, value: Any) -> Alternatives:
        parts = []
        for name, schema in _mapping("dependentSchemas", value).items():
            parts.append([self._lacks(name), *product([[_object(required=(name,))], self.sub(schema)])])
        return product(parts)

    def dependencies(self, value: Any) -> Alternatives:
        lists = {name: needed for name, needed in _mapping("dependencies", value).items() if isinstance(needed, list)}
        schemas = {name: schema for name, schema in value.items() if not isinstance(schema, list)}
        return product([self.dependent_required(lists), self.dependent_schemas(schemas)])

    def _lacks(self, name: str) -> Alternative:
        return _object(properties={name: frozenset({(self.owner.document.never, True)})})

    HANDLERS = {
        "$ref": "ref",
        "$dynamicRef": "dynamic_ref",
        "type": "type",
        "const": "const",
        "enum": "enum",
        "allOf": "all_of",
        "anyOf": "any_of",
        "oneOf": "one_of",
        "not": "not_",
        "if": "if_",
        "minimum": "minimum",
        "maximum": "maximum",
        "exclusiveMinimum": "exclusive_minimum",
        "exclusiveMaximum": "exclusive_maximum",
        "multipleOf": "multiple_of",
        "minLength": "min_length",
        "maxLength": "max_length",
        "pattern": "pattern",
        "format": "format",
        "prefixItems": "prefix_items",
        "items": "items",
        "additionalItems": "additional_items",
        "minItems": "min_items",
        "maxItems": "max_items",
        "uniqueItems": "unique_items",
        "contains": "contains",
        "properties": "properties",
        "patternProperties": "pattern_properties",
        "additionalProperties": "additional_properties",
        "propertyNames": "property_names",
        "required": "required",
        "minProperties": "min_properties",
        "maxProperties": "max_properties",
        "dependentRequired": "dependent_required",
        "dependentSchemas": "dependent_schemas",
        "dependencies": "dependencies",
    }


def _only(kind: str, **fields: Any) -> Alternative:
    return Alternative(frozenset({kind}), **fields)


def _contains(inside: Goal, outside: Goal, low: int, high: int | None) -> Alternative:
    return _only("array", array=Array(contains=(Contains(inside, outside, low, high),)))


class _Negative(_Keywords):
    """Each keyword's violations. Where a violation cannot be written down it is left out: fewer values, still sound."""

    def ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow(value, self.place), False)

    def dynamic_ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow_dynamic(value, self.place), False)

    def type(self, value: Any) -> Alternatives:
        names = _type_names(value)
        others = KINDS - frozenset().union(*(_TYPES[name] for name in names))
        result = [Alternative(others)] if others else []
        if "integer" in names and "number" not in names:
            result.append(_only("number", number=numbers.BROKEN))
        return result

    def const(self, value: Any) -> Alternatives:
        return self.enum([value])

    def enum(self, value: Any) -> Alternatives:
        kinds, texts, spellings, deep = _sorted_values(_list("enum", value))
        number = numbers.other_than(spellings) if spellings else None
        other = Alternative(KINDS - kinds, number=number, string=no(texts) if texts else None)
        made = [self.owner.document.made(_exactly(item)) for item in deep]
        return product([[other], *(self.owner.expand(place, False) for place in made)])

    def all_of(self, value: Any) -> Alternatives:
        return [alternative for schema in _schemas("allOf", value) for alternative in self.sub(schema, False)]

    def any_of(self, value: Any) -> Alternatives:
        return product([self.sub(schema, False) for schema in _schemas("anyOf", value)])

    def one_of(self, value: Any) -> Alternatives:
        """None of the options, or two of them."""
        result = self.any_of(value)
        options = _schemas("oneOf", value)
        for idx, option in enumerate(options):
            for earlier in options[:idx]:
                result += product([self.sub(option), self.sub(earlier)])
        return result

    def not_(self, value: Any) -> Alternatives:
        return self.sub(value)

    def if_(self, value: Any) -> Alternatives:
        test, then, otherwise = self.branches(value)
        violates_then = product([self.sub(test), self.sub(then, False)])
        violates_else = product([self.sub(test, False), self.sub(otherwise, False)])
        return violates_then + violates_else

    def minimum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_most(_number("minimum", value), strict=True))]

    def maximum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_least(_number("maximum", value), strict=True))]

    def exclusive_minimum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_most(_number("exclusiveMinimum", value)))]

    def exclusive_maximum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_least(_number("exclusiveMaximum", value)))]

    def multiple_of(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.no_multiple_of(self.multiple(value)))]

    def min_length(self, value: Any) -> Alternatives:
        least = _count("minLength", value)
        return [_only("string", string=repeat(CHAR, 0, least - 1))] if least else []

    def max_length(self, value: Any) -> Alternatives:
        return [_only("string", string=repeat(CHAR, _count("maxLength", value) + 1, None))]

    def pattern(self, value: Any) -> Alternatives:
        return [_only("string", string=no(found_in(_text("pattern", value))))]

    def prefix_items(self, value: Any) -> Alternatives:
        result = []
        for idx, schema in enumerate(_schemas("prefixItems", value, allow_empty=True)):
            prefix = (*(NOTHING_ASKED,) * idx, self.goal(schema, False))
            result.append(_only("array", array=Array(prefix, low=idx + 1)))
        return result

    def items(self, value: Any) -> Alternatives | None:
        if isinstance(value, list):
            return self.prefix_items(value)
        if self.tuple_length():
            return None
        return [_contains(self.goal(value, False), NOTHING_ASKED, 1, None)]

    def min_items(self, value: Any) -> Alternatives:
        least = _count("minItems", value)
        return [_only("array", array=Array(high=least - 1))] if least else []

    def max_items(self, value: Any) -> Alternatives:
        return [_only("array", array=Array(low=_count("maxItems", value) + 1))]

    def contains(self, value: Any) -> Alternatives:
        low, high = self.contains_counts()
        inside, outside = self.goal(value), self.goal(value, False)
        result = []
        if low == 1:
            result.append(_only("array", array=Array(items=outside, open=False)))
        elif low > 1:
            result.append(_contains(inside, outside, 0, low - 1))
        if high is not None:
            result.append(_contains(inside, outside, high + 1, None))
        return result

    def properties(self, value: Any) -> Alternatives:
        goals = {name: self.goal(schema, False) for name, schema in _mapping("properties", value).items()}
        shapes = [Object(properties={name: goal}, required=(name,)) for name, goal in goals.items()]
        return [_only("object", object=shape) for shape in shapes]

    def required(self, value: Any) -> Alternatives:
        return [self._lacks(name) for name in _strings("required", value)]

    def min_properties(self, value: Any) -> Alternatives:
        least = _count("minProperties", value)
        return [_only("object", object=Object(high=least - 1))] if least else []

    def max_properties(self, value: Any) -> Alternatives:
        return [_only("object", object=Object(low=_count("maxProperties", value) + 1))]

    def dependent_required(self, value: Any) -> Alternatives:
        result = []
        for name, needed in _mapping("dependentRequired", value).items():
            for lacked in _strings("dependentRequired", needed):
                result += product([[self._lacks(lacked)], [_object(required=(name,))]])
        return result

    def dependent_schemas(self, value: Any) -> Alternatives:
        result = []
        for name, schema in _mapping("dependentSchemas", value).items():
            has_name = _only("object", object=Object(required=(name,)))
            result += product([[has_name], self.sub(schema, False)])
        return result

    def _lacks(self, name: str) -> Alternative:
        return _only("object", object=Object(properties={name: frozenset({(self.owner.document.never, True)})}))

    HANDLERS = {
        keyword: method
        for keyword, method in _Positive.HANDLERS.items()
        if keyword not in ("format", "dependencies", "additionalItems")
    }


# Values of keywords, checked: a schema comes from an untrusted client.


def _type_names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            raise RequestError(f"type must be one of {', '.join(_TYPES)}, not {str(name)[:40]!r}.")
    return names


def _number(keyword: str, value: Any) -> int | Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise RequestError(f"{keyword} must be a number.")
    return value


def _count(keyword: str, value: Any, capped: bool = False) -> int:
    """`capped`: a larger upper limit means no more than the largest we take."""
    number = _number(keyword, value)
    if number > MAX_COUNT and not capped:
        raise RequestError(f"{keyword} is larger than {MAX_COUNT}: lower it.")
    number = min(number, MAX_COUNT)  # before it is made an integer: 1e999999999 has many digits
    if number != int(number) or number < 0:
        raise RequestError(f"{keyword} must be a whole number from 0.")
    return int(number)


def _text(keyword: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{keyword} must be a string.")
    return value


def _list(keyword: str, value: Any) -> list:
    if not isinstance(value, list):
        raise RequestError(f"{keyword} must be a list.")
    return value


def _strings(keyword: str, value: Any) -> list[str]:
    if any(not isinstance(item, str) for item in _list(keyword, value)):
        raise RequestError(f"{keyword} must be a list of strings.")
    return value


def _schemas(keyword: str, value: Any, allow_empty: bool = False) -> list:
    if not _list(keyword, value) and not allow_empty:
        raise RequestError(f"{keyword} must not be empty.")
    return value


def _mapping(keyword: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{keyword} must be an object.")
    return value


def _sorted_values(values: Iterable[Any]) -> tuple[frozenset[str], Node | None, Node | None, list[Any]]:
    """The values of an enum by kind: constants, strings, numbers, and arrays or objects."""
    kinds: set[str] = set()
    texts: list[Node] = []
    spellings: list[Node] = []
    deep: list[Any] = []
    for value in values:
        if value is None or isinstance(value, bool):
            kinds.add({None: "null", True: "true", False: "false"}[value])
        elif isinstance(value, str):
            texts.append(text(value))
        elif isinstance(value, (int, Decimal)):
            spellings.append(numbers.literal(value))
        else:
            deep.append(value)
    strings = either(*texts) if texts else None
    numerals = either(*spellings) if spellings else None
    return frozenset(kinds), strings, numerals, deep


def _exactly(value: Any) -> dict[str, Any]:
    """A schema that only this array or object satisfies."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"type": "array", "prefixItems": items, "minItems": len(value), "maxItems": len(value)}
    properties = {name: {"const": member} for name, member in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}
