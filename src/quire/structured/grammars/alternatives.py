"""What a JSON value may be, once every `allOf`, `$ref`, `if` and `not` has been worked out: a list of alternatives.

Made by `schema.py`, turned into a grammar by `json_grammar.py`. An alternative is a conjunction: it says for each kind
of value what must hold. Its items and properties are given as goals, which are worked out on demand. Knows no keywords.
"""

from dataclasses import dataclass, field, replace
from typing import TypeVar

from quire.errors import RequestError
from quire.structured.grammars.document import Subschema
from quire.structured.grammars.regular import NONE, Node, both

MAX_ALTERNATIVES = 512
KINDS = frozenset({"null", "true", "false", "number", "string", "array", "object"})

Literal = tuple[Subschema, bool]  # the value must satisfy (True) or violate (False) the schema
Goal = frozenset[Literal]
NOTHING_ASKED: Goal = frozenset()


@dataclass(frozen=True)
class Contains:
    goal: Goal
    outside: Goal  # what all other items satisfy, where there is a maximum
    low: int
    high: int | None


@dataclass(frozen=True)
class Array:
    prefix: tuple[Goal, ...] = ()
    items: Goal = NOTHING_ASKED  # of those after the prefix
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False
    open: bool = True  # nothing was said about the items after the prefix

    def at(self, position: int) -> Goal:
        return self.prefix[position] if position < len(self.prefix) else self.items

    def merge(self, other: "Array") -> "Array":
        length = max(len(self.prefix), len(other.prefix))
        return Array(
            prefix=tuple(self.at(position) | other.at(position) for position in range(length)),
            items=self.items | other.items,
            low=max(self.low, other.low),
            high=_least(self.high, other.high),
            contains=tuple(dict.fromkeys(self.contains + other.contains)),
            unique=self.unique or other.unique,
            open=self.open and other.open,
        )


@dataclass(frozen=True)
class Rest:
    """What must hold for properties that have none of these names and match none of these patterns."""

    names: frozenset[str]
    patterns: tuple[Node, ...]
    goal: Goal


@dataclass(frozen=True)
class Object:
    properties: dict[str, Goal] = field(default_factory=dict)  # in the order they are written
    patterns: tuple[tuple[Node, Goal], ...] = ()
    rest: tuple[Rest, ...] = ()
    names: tuple[Node, ...] = ()  # every name is in all of these
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None

    def merge(self, other: "Object") -> "Object":
        properties = dict(self.properties)
        for name, goal in other.properties.items():
            properties[name] = properties.get(name, NOTHING_ASKED) | goal
        return Object(
            properties=properties,
            patterns=self.patterns + other.patterns,
            rest=self.rest + other.rest,
            names=self.names + other.names,
            required=tuple(dict.fromkeys(self.required + other.required)),
            low=max(self.low, other.low),
            high=_least(self.high, other.high),
        )


@dataclass(frozen=True)
class Seen:
    """Which properties and items some keyword applied to: `unevaluated…` is about the others."""

    names: frozenset[str] = frozenset()
    patterns: tuple[Node, ...] = ()
    all_properties: bool = False
    items: int = 0
    all_items: bool = False

    def merge(self, other: "Seen") -> "Seen":
        return Seen(
            names=self.names | other.names,
            patterns=self.patterns + other.patterns,
            all_properties=self.all_properties or other.all_properties,
            items=max(self.items, other.items),
            all_items=self.all_items or other.all_items,
        )


_SAW_NOTHING = Seen()
_ANY_ARRAY, _ANY_OBJECT = Array(), Object()
_Shape = TypeVar("_Shape", Array, Object, Seen)


@dataclass(frozen=True)
class Alternative:
    kinds: frozenset[str] = KINDS
    number: Node | None = None  # spellings; None: any number
    string: Node | None = None  # decoded texts; None: any string
    array: Array = _ANY_ARRAY
    object: Object = _ANY_OBJECT
    seen: Seen = _SAW_NOTHING

    def merge(self, other: "Alternative") -> "Alternative | None":
        """Both at once; None where that is plainly impossible."""
        kinds = self.kinds & other.kinds
        number = _both(self.number, other.number)
        string = _both(self.string, other.string)
        if number is NONE:
            kinds -= {"number"}
        if string is NONE:
            kinds -= {"string"}
        if not kinds:
            return None
        return Alternative(
            kinds,
            number,
            string,
            array=_merged(self.array, other.array, _ANY_ARRAY),
            object=_merged(self.object, other.object, _ANY_OBJECT),
            seen=_merged(self.seen, other.seen, _SAW_NOTHING),
        )

    def unseen(self) -> "Alternative":
        return self if self.seen is _SAW_NOTHING else replace(self, seen=_SAW_NOTHING)


def product(parts: list[list[Alternative]]) -> list[Alternative]:
    """Every way to satisfy one alternative of each part."""
    result = [Alternative()]
    for part in parts:
        merged = [left.merge(right) for left in result for right in part]
        result = [alternative for alternative in merged if alternative is not None]
        if len(result) > MAX_ALTERNATIVES:
            raise RequestError(
                "anyOf, oneOf, not or if/then/else of the schema combine into too many cases: simplify them."
            )
    return result


def _merged(left: _Shape, right: _Shape, neutral: _Shape) -> _Shape:
    if left is neutral:
        return right
    return left if right is neutral else left.merge(right)


def _both(left: Node | None, right: Node | None) -> Node | None:
    if left is None:
        return right
    return left if right is None else both(left, right)


def _least(left: int | None, right: int | None) -> int | None:
    if left is None:
        return right
    return left if right is None else min(left, right)
