"""What the keywords of a JSON schema ask for: each gives the alternatives in which it holds.

Called by `schema.py`; what violates a keyword is in `violations.py`.
"""

from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.structured.grammars import formats, numbers
from quire.structured.grammars import keyword_values as read
from quire.structured.grammars.alternatives import (
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
from quire.structured.grammars.document import Subschema
from quire.structured.grammars.pattern import found_in
from quire.structured.grammars.regular import ANYTHING, CHAR, Node, either, repeat
from quire.structured.spec import REFUSED_FORMATS

if TYPE_CHECKING:
    from quire.structured.grammars.schema import Schema

Alternatives = list[Alternative]


class Keywords:
    """What one schema's keywords mean; `keyword` gives None for those that assert nothing."""

    HANDLERS: dict[str, str] = {}

    def __init__(self, owner: "Schema", place: Subschema, schema: dict) -> None:
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
        return frozenset(read.mapping("properties", self.schema.get("properties", {})))

    def name_patterns(self) -> tuple[Node, ...]:
        return tuple(map(found_in, read.mapping("patternProperties", self.schema.get("patternProperties", {}))))

    def tuple_length(self) -> int:
        prefix = self.schema.get("prefixItems", self.schema.get("items"))
        return len(prefix) if isinstance(prefix, list) else 0

    def contains_counts(self) -> tuple[int, int | None]:
        low, high = self.schema.get("minContains", 1), self.schema.get("maxContains")
        return read.count("minContains", low), None if high is None else read.count("maxContains", high)

    def branches(self, value: Any) -> tuple[Any, Any, Any]:
        return value, self.schema.get("then", True), self.schema.get("else", True)

    def multiple(self, value: Any) -> int | Decimal:
        return read.number("multipleOf", value)


def object_with(**fields: Any) -> Alternative:
    return Alternative(object=Object(**fields))


class Positive(Keywords):
    def ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow(value, self.place), True)

    def dynamic_ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow_dynamic(value, self.place), True)

    def type(self, value: Any) -> Alternatives:
        names = read.type_names(value)
        kinds = frozenset().union(*(read.TYPES[name] for name in names))
        whole = "integer" in names and "number" not in names
        return [Alternative(kinds, number=numbers.INTEGER if whole else None)]

    def const(self, value: Any) -> Alternatives:
        return self.enum([value])

    def enum(self, value: Any) -> Alternatives:
        kinds, texts, spellings, deep = read.by_kind(read.array("enum", value))
        result = [Alternative(kinds)] if kinds else []
        if texts:
            result.append(Alternative(frozenset({"string"}), string=texts))
        if spellings:
            result.append(Alternative(frozenset({"number"}), number=spellings))
        for item in deep:
            result += self.owner.expand(self.owner.document.made(read.exactly(item)), True)
        return result

    def all_of(self, value: Any) -> Alternatives:
        return product([self.sub(schema) for schema in read.schemas("allOf", value)])

    def any_of(self, value: Any) -> Alternatives:
        return [alternative for schema in read.schemas("anyOf", value) for alternative in self.sub(schema)]

    def one_of(self, value: Any) -> Alternatives:
        result: Alternatives = []
        options = read.schemas("oneOf", value)
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
        return [alternative.unseen() for alternative in self.sub(value, False)]

    def if_(self, value: Any) -> Alternatives:
        test, then, otherwise = self.branches(value)
        return product([self.sub(test), self.sub(then)]) + product([self.not_(test), self.sub(otherwise)])

    def minimum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_least(read.number("minimum", value)))]

    def maximum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_most(read.number("maximum", value)))]

    def exclusive_minimum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_least(read.number("exclusiveMinimum", value), strict=True))]

    def exclusive_maximum(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.at_most(read.number("exclusiveMaximum", value), strict=True))]

    def multiple_of(self, value: Any) -> Alternatives:
        return [Alternative(number=numbers.multiple_of(self.multiple(value)))]

    def min_length(self, value: Any) -> Alternatives:
        return [Alternative(string=repeat(CHAR, read.count("minLength", value), None))]

    def max_length(self, value: Any) -> Alternatives:
        return [Alternative(string=repeat(CHAR, 0, read.count("maxLength", value, capped=True)))]

    def pattern(self, value: Any) -> Alternatives:
        return [Alternative(string=found_in(read.string("pattern", value)))]

    def format(self, value: Any) -> Alternatives | None:
        value = read.string("format", value)
        if value in REFUSED_FORMATS:
            raise RequestError(f"format {value!r} is not supported: remove it, or use pattern.")
        return [Alternative(string=formats.language(value))] if value in formats.HONOURED else None

    def prefix_items(self, value: Any) -> Alternatives:
        prefix = tuple(map(self.goal, read.schemas("prefixItems", value, allow_empty=True)))
        return [Alternative(array=Array(prefix), seen=Seen(items=len(prefix)))]

    def items(self, value: Any) -> Alternatives:
        if isinstance(value, list):  # as written before 2020-12
            return self.prefix_items(value)
        prefix = (NOTHING_ASKED,) * self.tuple_length()
        return [Alternative(array=Array(prefix, self.goal(value), open=False), seen=Seen(all_items=True))]

    def additional_items(self, value: Any) -> Alternatives | None:
        return self.items(value) if isinstance(self.schema.get("items"), list) else None

    def min_items(self, value: Any) -> Alternatives:
        return [Alternative(array=Array(low=read.count("minItems", value)))]

    def max_items(self, value: Any) -> Alternatives:
        return [Alternative(array=Array(high=read.count("maxItems", value, capped=True)))]

    def unique_items(self, value: Any) -> Alternatives | None:
        return [Alternative(array=Array(unique=True))] if value is True else None

    def contains(self, value: Any) -> Alternatives:
        contains = Contains(self.goal(value), self.goal(value, False), *self.contains_counts())
        return [Alternative(array=Array(contains=(contains,)))]

    def properties(self, value: Any) -> Alternatives:
        goals = {name: self.goal(schema) for name, schema in read.mapping("properties", value).items()}
        return [Alternative(object=Object(properties=goals), seen=Seen(names=frozenset(goals)))]

    def pattern_properties(self, value: Any) -> Alternatives:
        goals = {pattern: self.goal(schema) for pattern, schema in read.mapping("patternProperties", value).items()}
        patterns = tuple((found_in(pattern), goal) for pattern, goal in goals.items())
        seen = Seen(patterns=tuple(node for node, _ in patterns))
        return [Alternative(object=Object(patterns=patterns), seen=seen)]

    def additional_properties(self, value: Any) -> Alternatives:
        rest = Rest(self.names(), self.name_patterns(), self.goal(value))
        return [Alternative(object=Object(rest=(rest,)), seen=Seen(all_properties=True))]

    def property_names(self, value: Any) -> Alternatives:
        allowed = [alternative for alternative in self.sub(value) if "string" in alternative.kinds]
        strings = [alternative.string or ANYTHING for alternative in allowed]
        return [object_with(names=(either(*strings),))]

    def required(self, value: Any) -> Alternatives:
        return [object_with(required=tuple(read.strings("required", value)))]

    def min_properties(self, value: Any) -> Alternatives:
        return [object_with(low=read.count("minProperties", value))]

    def max_properties(self, value: Any) -> Alternatives:
        return [object_with(high=read.count("maxProperties", value, capped=True))]

    def dependent_required(self, value: Any) -> Alternatives:
        parts = []
        for name, needed in read.mapping("dependentRequired", value).items():
            parts.append([self._lacks(name), object_with(required=(name, *read.strings("dependentRequired", needed)))])
        return product(parts)

    def dependent_schemas(self, value: Any) -> Alternatives:
        parts = []
        for name, schema in read.mapping("dependentSchemas", value).items():
            parts.append([self._lacks(name), *product([[object_with(required=(name,))], self.sub(schema)])])
        return product(parts)

    def dependencies(self, value: Any) -> Alternatives:
        dependencies = read.mapping("dependencies", value)
        lists = {name: needed for name, needed in dependencies.items() if isinstance(needed, list)}
        schemas = {name: schema for name, schema in value.items() if not isinstance(schema, list)}
        return product([self.dependent_required(lists), self.dependent_schemas(schemas)])

    def _lacks(self, name: str) -> Alternative:
        return object_with(properties={name: frozenset({(self.owner.document.never, True)})})

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
