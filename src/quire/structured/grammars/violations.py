"""What violates the keywords of a JSON schema: each gives alternatives in which it does not hold.

Called by `schema.py`.
"""

from typing import Any

from quire.structured.grammars import keyword_values as read
from quire.structured.grammars import numbers
from quire.structured.grammars.alternatives import (
    KINDS,
    NOTHING_ASKED,
    Alternative,
    Array,
    Contains,
    Goal,
    Object,
    product,
)
from quire.structured.grammars.keywords import Alternatives, Keywords, Positive, object_with
from quire.structured.grammars.pattern import found_in
from quire.structured.grammars.regular import CHAR, no, repeat


def _only(kind: str, **fields: Any) -> Alternative:
    return Alternative(frozenset({kind}), **fields)


def _contains(inside: Goal, outside: Goal, low: int, high: int | None) -> Alternative:
    return _only("array", array=Array(contains=(Contains(inside, outside, low, high),)))


class Negative(Keywords):
    """Each keyword's violations. Where a violation cannot be written down it is left out: fewer values, still sound."""

    def ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow(value, self.place), False)

    def dynamic_ref(self, value: Any) -> Alternatives:
        return self.owner.expand(self.owner.document.follow_dynamic(value, self.place), False)

    def type(self, value: Any) -> Alternatives:
        names = read.type_names(value)
        others = KINDS - frozenset().union(*(read.TYPES[name] for name in names))
        result = [Alternative(others)] if others else []
        if "integer" in names and "number" not in names:
            result.append(_only("number", number=numbers.BROKEN))
        return result

    def const(self, value: Any) -> Alternatives:
        return self.enum([value])

    def enum(self, value: Any) -> Alternatives:
        kinds, texts, spellings, deep = read.by_kind(read.array("enum", value))
        number = numbers.other_than(spellings) if spellings else None
        other = Alternative(KINDS - kinds, number=number, string=no(texts) if texts else None)
        made = [self.owner.document.made(read.exactly(item)) for item in deep]
        return product([[other], *(self.owner.expand(place, False) for place in made)])

    def all_of(self, value: Any) -> Alternatives:
        return [alternative for schema in read.schemas("allOf", value) for alternative in self.sub(schema, False)]

    def any_of(self, value: Any) -> Alternatives:
        return product([self.sub(schema, False) for schema in read.schemas("anyOf", value)])

    def one_of(self, value: Any) -> Alternatives:
        """None of the options, or two of them."""
        result = self.any_of(value)
        options = read.schemas("oneOf", value)
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
        return [_only("number", number=numbers.at_most(read.number("minimum", value), strict=True))]

    def maximum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_least(read.number("maximum", value), strict=True))]

    def exclusive_minimum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_most(read.number("exclusiveMinimum", value)))]

    def exclusive_maximum(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.at_least(read.number("exclusiveMaximum", value)))]

    def multiple_of(self, value: Any) -> Alternatives:
        return [_only("number", number=numbers.no_multiple_of(self.multiple(value)))]

    def min_length(self, value: Any) -> Alternatives:
        least = read.count("minLength", value)
        return [_only("string", string=repeat(CHAR, 0, least - 1))] if least else []

    def max_length(self, value: Any) -> Alternatives:
        return [_only("string", string=repeat(CHAR, read.count("maxLength", value) + 1, None))]

    def pattern(self, value: Any) -> Alternatives:
        return [_only("string", string=no(found_in(read.string("pattern", value))))]

    def prefix_items(self, value: Any) -> Alternatives:
        result = []
        for idx, schema in enumerate(read.schemas("prefixItems", value, allow_empty=True)):
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
        least = read.count("minItems", value)
        return [_only("array", array=Array(high=least - 1))] if least else []

    def max_items(self, value: Any) -> Alternatives:
        return [_only("array", array=Array(low=read.count("maxItems", value) + 1))]

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
        goals = {name: self.goal(schema, False) for name, schema in read.mapping("properties", value).items()}
        shapes = [Object(properties={name: goal}, required=(name,)) for name, goal in goals.items()]
        return [_only("object", object=shape) for shape in shapes]

    def required(self, value: Any) -> Alternatives:
        return [self._lacks(name) for name in read.strings("required", value)]

    def min_properties(self, value: Any) -> Alternatives:
        least = read.count("minProperties", value)
        return [_only("object", object=Object(high=least - 1))] if least else []

    def max_properties(self, value: Any) -> Alternatives:
        return [_only("object", object=Object(low=read.count("maxProperties", value) + 1))]

    def dependent_required(self, value: Any) -> Alternatives:
        result = []
        for name, needed in read.mapping("dependentRequired", value).items():
            for lacked in read.strings("dependentRequired", needed):
                result += product([[self._lacks(lacked)], [object_with(required=(name,))]])
        return result

    def dependent_schemas(self, value: Any) -> Alternatives:
        result = []
        for name, schema in read.mapping("dependentSchemas", value).items():
            has_name = _only("object", object=Object(required=(name,)))
            result += product([[has_name], self.sub(schema, False)])
        return result

    def _lacks(self, name: str) -> Alternative:
        return _only("object", object=Object(properties={name: frozenset({(self.owner.document.never, True)})}))

    HANDLERS = {
        keyword: method
        for keyword, method in Positive.HANDLERS.items()
        if keyword not in ("format", "dependencies", "additionalItems")
    }
