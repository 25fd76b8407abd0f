"""What a JSON value may be, once every `allOf`, `$ref`, `if` and `not` has been worked out: a list of alternatives.

Made by `schema.py`, turned into a grammar by `json_grammar.py`. An alternative is a conjunction: it says for each kind of
value what must hold, and children are named by their goals, which are worked out when somebody asks. Knows no keywords.
"""

from dataclasses import dataclass, field, replace

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
    outside: Goal  # what the items that do not count satisfy, where there is a maximum
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
            tuple(self.at(i) | other.at(i) for i in range(length)),
            self.items | other.items,
            max(self.low, other.low),
            _least(self.high, other.high),
            self.contains + tuple(c for c in other.contains if c not in self.contains),
            self.unique or other.unique,
            self.open and other.open,
        )


@dataclass(frozen=True)
class Rest:
    """What holds for properties that have none of these names and match none of these patterns."""

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
            properties,
            self.patterns + other.patterns,
            self.rest + other.rest,
            self.names + other.names,
            tuple(dict.fromkeys(self.required + other.required)),
            max(self.low, other.low),
            _least(self.high, other.high),
        )


@dataclass(frozen=True)
class Seen:
    """Which properties and items some schema looked at: `unevaluated…` speaks about the others."""

    names: frozenset[str] = frozenset()
    patterns: tuple[Node, ...] = ()
    all_properties: bool = False
    items: int = 0
    all_items: bool = False

    def merge(self, other: "Seen") -> "Seen":
        return Seen(
            self.names | other.names,
            self.patterns + other.patterns,
            self.all_properties or other.all_properties,
            max(self.items, other.items),
            self.all_items or other.all_items,
        )


_SAW_NOTHING = Seen()
_ANY_ARRAY, _ANY_OBJECT = Array(), Object()


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
        number, string = _both(self.number, other.number), _both(self.string, other.string)
        kinds -= {kind for kind, node in (("number", number), ("string", string)) if node is NONE}
        if not kinds:
            return None
        return Alternative(
            kinds,
            number,
            string,
            _merged(self.array, other.array, _ANY_ARRAY),
            _merged(self.object, other.object, _ANY_OBJECT),
            _merged(self.seen, other.seen, _SAW_NOTHING),
        )

    def unseen(self) -> "Alternative":
        return self if self.seen is _SAW_NOTHING else replace(self, seen=_SAW_NOTHING)


def product(parts: list[list[Alternative]]) -> list[Alternative]:
    """Every way to satisfy one alternative of each part."""
    result = [Alternative()]
    for part in parts:
        result = [merged for a in result for b in part if (merged := a.merge(b)) is not None]
        if len(result) > MAX_ALTERNATIVES:
            raise RequestError(
                "anyOf, oneOf, not or if/then/else of the schema combine into too many cases: simplify them."
            )
    return result


def _merged(a, b, neutral):
    return b if a is neutral else a if b is neutral else a.merge(b)


def _both(a: Node | None, b: Node | None) -> Node | None:
    return b if a is None else a if b is None else both(a, b)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
