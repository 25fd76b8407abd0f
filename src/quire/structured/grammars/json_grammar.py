"""A JSON schema as a grammar: properties in the schema's order, bounded blanks, numbers that fit their types.

Called by the engines' compile step. An object that names its properties gets no others unless the schema speaks of others,
and a tuple ends with its last item: fewer values than the schema allows, and what its author meant.
"""

from itertools import product as pairs

from quire.errors import RequestError
from quire.structured.grammars import numbers
from quire.structured.grammars.alternatives import NOTHING_ASKED, Array, Contains, Goal, Object
from quire.structured.grammars.regular import ANYTHING, Node, both, derivative, either, finite, is_empty, no, text
from quire.structured.grammars.rules import Alternative, Many, Ref, Rules, Symbol, escaped, literal
from quire.structured.grammars.schema import Schema

MAX_STATES = 4000  # of one array or object that counts
MAX_ITEMS = 1000
MAX_FREE = 20  # properties of names the schema does not list, where there is a maximum
MAX_ANY_ORDER = 6  # values that may come in any order where items must be unique

_HEX = "[0-9a-fA-F]"
# Written without counts: xgrammar takes tens of milliseconds for a mask where a count is near.
_ESCAPE = (
    r'["\\/bfnrt] | "u" ([0-9abcefABCEF] HEX HEX HEX | [dD] [0-7] HEX HEX | [dD] [89abAB] HEX HEX "\\u" [dD] [c-fC-F] HEX HEX)'
).replace("HEX", _HEX)
_NUMBER = f'"-"? ("0" | [1-9] [0-9]{{0,{numbers.MAX_DIGITS - 1}}}) ("." [0-9]{{1,20}})? ([eE] [+\\-]? [0-9]{{1,2}})?'
_INTEGER = f'"0" | "-"? [1-9] [0-9]{{0,{numbers.MAX_DIGITS - 1}}}'


def _basics(compact: bool) -> dict[str, str]:
    """Blanks are a line break and an indentation, or one space, or nothing: never blanks for ever."""
    return {
        "blank": '""' if compact else '"" | " " | "\\n" [ \\t]{0,16}',
        "colon": '":"' if compact else '":" " "?',
        "escape": _ESCAPE,
        "string": r""""\"" characters""",
        # What follows a string is said ahead: else every token with a quote in it is tried whenever a mask is made.
        "characters": f"({characters('characters')}) (= [ \\n\\t]* [,}}\\]:])",
        "number": _NUMBER,
        "integer": _INTEGER,
        "value": 'string | number | object | array | "true" | "false" | "null"',
        "member": r""""\"" name colon value""",
        "name": characters("name"),
        "object": '"{" (blank member ("," blank member)* blank)? "}"',
        "array": '"[" (blank value ("," blank value)* blank)? "]"',
    }


def characters(rule: str) -> str:
    """The body of a rule for the rest of a string."""
    return rf""""\"" | [\u0020-\u0021\u0023-\u005b\u005d-\ud7ff\ue000-\U0010ffff] {rule} | "\\" escape {rule}"""


def json_grammar(schema_text: str, compact: bool = False) -> str:
    """GBNF whose every text is JSON that satisfies the schema; RequestError if it cannot be written, or is empty."""
    try:
        grammar = _Grammar(Schema(schema_text), compact)
        root = grammar.value(grammar.schema.root)
        grammar.rules.give_own("string", '"\\""', characters)
        text = grammar.rules.gbnf(root)
    except RecursionError:
        raise RequestError("the schema is nested too deeply.") from None
    if text is None:
        raise RequestError(
            "no JSON value satisfies the schema: look for false, empty enums and keywords that contradict."
        )
    return text


class _Grammar:
    def __init__(self, schema: Schema, compact: bool) -> None:
        self.schema = schema
        self.rules = Rules(_basics(compact))
        self._names: dict[Goal, Ref] = {}
        self._pending: list[tuple[Goal, Ref]] = []

    def value(self, goal: Goal) -> Ref:
        """The rule for values that reach a goal; all that it leads to is worked out as well."""
        ref = self._ref(goal)
        while self._pending:
            goal, pending = self._pending.pop()
            self.rules.add(pending.rule, self._alternatives(goal))
        return ref

    def _ref(self, goal: Goal) -> Ref:
        if not goal:
            return Ref("value")
        if goal not in self._names:
            self._names[goal] = ref = Ref(f"v{len(self._names)}")
            self._pending.append((goal, ref))
        return self._names[goal]

    def _alternatives(self, goal: Goal) -> list[Alternative]:
        result: list[Alternative] = []
        for alternative in self.schema.alternatives(goal):
            result += [(literal(word),) for word in ("null", "true", "false") if word in alternative.kinds]
            if "string" in alternative.kinds:
                result += self._string(alternative.string)
            if "number" in alternative.kinds:
                result += self._number(alternative.number)
            if "array" in alternative.kinds:
                result.append(('"["', self._array(alternative.array)))
            if "object" in alternative.kinds:
                result.append(('"{"', self._object(alternative.object)))
        return result

    def _string(self, node: Node | None) -> list[Alternative]:
        if node is None or node is ANYTHING:
            return [(Ref("string"),)]
        words = finite(node)
        if words is not None:
            return [(literal(f'"{escaped(word)}"'),) for word in sorted(words)]
        return [('"\\""', self.rules.language(node, quoted=True))]

    def _number(self, node: Node | None) -> list[Alternative]:
        if node is None or node is numbers.INTEGER:
            return [(Ref("number" if node is None else "integer"),)]
        words = finite(node)
        if words is not None:
            return [(literal(word),) for word in sorted(words)]
        return [(self.rules.language(both(node, numbers.SPELLINGS), quoted=False),)]

    # Objects: a chain of rules, one for each property still to come and number of properties written so far.

    def _object(self, shape: Object) -> Ref:
        named = dict.fromkeys([*shape.properties, *shape.required])
        goals = {name: self._goal_of(shape, name) for name in named}
        free = [] if self._is_closed(shape, goals) else self._free(shape, list(named))
        if free and shape.low > len(named) + 1:
            raise RequestError(
                f"minProperties {shape.low} asks for more properties than are named: list them under properties."
            )
        counts = shape.low > 0 or shape.high is not None
        cap = max(shape.low, shape.high or 0, 1) if counts else 1
        if len(named) * min(cap, len(named) + 1) > MAX_STATES:
            raise RequestError(
                "minProperties and maxProperties over so many properties are not supported: remove them."
            )
        stem = self.rules.new("o")
        for position in reversed(range(len(named) + 1)):
            for count in range(min(position, cap) + 1):
                state = f"{stem}_{position}_{count}"
                if position == len(named):
                    self.rules.add(state, self._last(shape, free, count))
                    continue
                name = list(named)[position]
                following: list[Alternative] = []
                if shape.high is None or count < shape.high:
                    member = (literal(f'"{escaped(name)}"'), Ref("colon"), self._ref(goals[name]))
                    following.append((*_before(count), *member, Ref(f"{stem}_{position + 1}_{min(count + 1, cap)}")))
                if name not in shape.required:
                    following.append((Ref(f"{stem}_{position + 1}_{count}"),))
                self.rules.add(state, following)
        return Ref(f"{stem}_0_0")

    def _last(self, shape: Object, free: list[Alternative], count: int) -> list[Alternative]:
        """After the named properties. Free names may repeat, so that all of them together count as one."""
        result: list[Alternative] = [_after(count, '"}"')] if count >= shape.low else []
        room = None if shape.high is None else shape.high - count
        if free and count + 1 >= shape.low and room != 0:
            name = self.rules.add(self.rules.new("f"), free)
            if room is None:
                result.append((*_before(count), name, Many(('","', Ref("blank"), name)), Ref("blank"), '"}"'))
            for more in range(min(room or 0, MAX_FREE)):
                result.append((*_before(count), name, *(('","', Ref("blank"), name) * more), Ref("blank"), '"}"'))
        return result

    def _goal_of(self, shape: Object, name: str) -> Goal:
        goal = shape.properties.get(name, NOTHING_ASKED)
        for node, asked in shape.patterns:
            goal |= asked if _matches(node, name) else NOTHING_ASKED
        for rest in shape.rest:
            if name not in rest.names and not any(_matches(node, name) for node in rest.patterns):
                goal |= rest.goal
        allowed = all(_matches(node, name) for node in shape.names)
        return goal if allowed else goal | {(self.schema.document.never, True)}

    def _is_closed(self, shape: Object, goals: dict[str, Goal]) -> bool:
        never = (self.schema.document.never, True)
        described = any(never not in goals[name] for name in shape.properties)
        return described and not shape.patterns and not shape.rest and shape.low <= len(goals)

    def _free(self, shape: Object, named: list[str]) -> list[Alternative]:
        """Members whose names the schema does not list, by what holds for them."""
        unnamed = both(*shape.names, *([no(either(*map(text, named)))] if named else []))
        tests = [(node, asked) for node, asked in shape.patterns]
        for rest in shape.rest:
            inside = both(no(either(*map(text, rest.names))), *(no(node) for node in rest.patterns))
            tests.append((inside, rest.goal))
        tests = [(node, asked) for node, asked in tests if asked]
        if len(tests) > 6:
            raise RequestError("patternProperties: more than 6 patterns for one object are not supported.")
        result: list[Alternative] = []
        for choice in pairs((True, False), repeat=len(tests)):
            names = both(unnamed, *(node if taken else no(node) for taken, (node, _) in zip(choice, tests)))
            goal = frozenset().union(*(asked for taken, (_, asked) in zip(choice, tests) if taken))
            if (self.schema.document.never, True) in goal or is_empty(names):
                continue
            result += [(*key, Ref("colon"), self._ref(goal)) for key in self._string(names)]
        return result

    # Arrays.

    def _array(self, shape: Array) -> Ref:
        high = shape.high
        if shape.open and shape.prefix and not shape.contains and shape.low <= len(shape.prefix):
            high = len(shape.prefix) if high is None else min(high, len(shape.prefix))
        if shape.unique and (high is None or high > 1):
            return self._unique(shape, high)
        if shape.contains:
            return self._counting(shape, high)
        stem, length = self.rules.new("a"), len(shape.prefix)
        for position in range(length):
            following: list[Alternative] = [_after(position, '"]"')] if position >= shape.low else []
            if high is None or position < high:
                following.append((*_before(position), self._ref(shape.prefix[position]), Ref(f"{stem}_{position + 1}")))
            self.rules.add(f"{stem}_{position}", following)
        self._tail(stem, shape, high)
        return Ref(f"{stem}_0")

    def _tail(self, stem: str, shape: Array, high: int | None) -> None:
        """The items after the prefix: one rule for each that is counted, the last one for all that are not."""
        length, item = len(shape.prefix), self._ref(shape.items)
        if shape.low > MAX_ITEMS:
            raise RequestError(f"minItems is larger than {MAX_ITEMS}: lower it.")
        high = min(high, MAX_ITEMS + length) if high is not None else None
        last = max(length, shape.low, 1) if high is None else max(high, length)
        for position in range(length, last + 1):
            following: list[Alternative] = [_after(position, '"]"')] if position >= shape.low else []
            if high is None or position < high:
                following.append((*_before(position), item, Ref(f"{stem}_{min(position + 1, last)}")))
            self.rules.add(f"{stem}_{position}", following)

    def _counting(self, shape: Array, high: int | None) -> Ref:
        """`contains`: states are the position and how many items counted so far, for each `contains`."""
        last = max(len(shape.prefix), shape.low, 1) if high is None else high  # later positions are all alike
        limits = [c.low if c.high is None else max(c.high, c.low) for c in shape.contains]
        size = last + 1
        for limit in limits:
            size *= limit + 1
        if size > MAX_STATES or len(limits) > 3:
            raise RequestError(
                "contains with counts this large is not supported: lower minContains, maxContains or maxItems."
            )
        stem = self.rules.new("c")
        for position in range(last + 1):
            for counts in pairs(*(range(limit + 1) for limit in limits)):
                enough = position >= shape.low and all(n >= c.low for n, c in zip(counts, shape.contains))
                following: list[Alternative] = [_after(position, '"]"')] if enough else []
                if high is None or position < high:
                    for goal, after in _choices(shape.contains, counts):
                        symbols: tuple[Symbol, ...] = (*_before(position), self._ref(goal | shape.at(position)))
                        following.append((*symbols, Ref(_state(stem, min(position + 1, last), after))))
                self.rules.add(_state(stem, position, counts), following)
        return Ref(_state(stem, 0, (0,) * len(limits)))

    def _unique(self, shape: Array, high: int | None) -> Ref:
        positions = [self._values(goal) for goal in (*shape.prefix, shape.items)]
        if shape.contains or any(values is None for values in positions):
            raise RequestError(
                "uniqueItems is only supported where the items are an enum, constants or booleans: remove it."
            )
        values = list(dict.fromkeys(v for position in positions for v in position))
        any_order = len(values) <= MAX_ANY_ORDER
        if not any_order and shape.prefix:
            raise RequestError(
                f"uniqueItems with prefixItems of more than {MAX_ANY_ORDER} values is not supported: remove it."
            )
        stem = self.rules.new("u")
        start = (0, frozenset())
        names, queue = {start: f"{stem}_0"}, [start]
        for count, used in queue:  # grows as it is read
            following: list[Alternative] = [_after(count, '"]"')] if count >= shape.low else []
            for index, value in enumerate(values):
                allowed = positions[min(count, len(shape.prefix))]
                if value not in allowed or index in used or (high is not None and count >= high):
                    continue
                after = (count + 1, used | {index} if any_order else frozenset(range(index + 1)))
                if after not in names:
                    names[after] = f"{stem}_{len(names)}"
                    queue.append(after)
                following.append((*_before(count), literal(value), Ref(names[after])))
            self.rules.add(names[count, used], following)
            if len(names) > MAX_STATES:
                raise RequestError("uniqueItems over so many values is not supported: remove it.")
        return Ref(names[start])

    def _values(self, goal: Goal) -> list[str] | None:
        """Every value that reaches the goal, as JSON; None if they cannot be listed."""
        result: list[str] = []
        for alternative in self.schema.alternatives(goal):
            if alternative.kinds & {"array", "object"}:
                return None
            result += [word for word in ("null", "true", "false") if word in alternative.kinds]
            for kind, node in (("string", alternative.string), ("number", alternative.number)):
                words = finite(node) if node is not None else None
                if kind in alternative.kinds:
                    if words is None:
                        return None
                    result += [f'"{escaped(word)}"' if kind == "string" else word for word in sorted(words)]
        return result


def _before(count: int) -> tuple[Symbol, ...]:
    return ('","', Ref("blank")) if count else (Ref("blank"),)


def _after(count: int, close: str) -> Alternative:
    """The end of an array or object. It belongs to the rules of what is inside, so that something always follows a value."""
    return (Ref("blank"), close) if count else (close,)


def _state(stem: str, position: int, counts: tuple[int, ...]) -> str:
    return "_".join(map(str, (stem, position, *counts)))


def _choices(contains: tuple[Contains, ...], counts: tuple[int, ...]) -> list[tuple[Goal, tuple[int, ...]]]:
    """What the next item may be, and the counts after it."""
    options = []
    for c, count in zip(contains, counts):
        limit = c.low if c.high is None else c.high
        inside = [(c.goal, min(count + 1, limit))] if c.high is None or count < c.high else []
        options.append([*inside, (c.outside if c.high is not None else NOTHING_ASKED, count)])
    return [(frozenset().union(*(g for g, _ in choice)), tuple(n for _, n in choice)) for choice in pairs(*options)]


def _matches(node: Node, name: str) -> bool:
    for character in name:
        node = derivative(node, ord(character))
    return node.nullable
