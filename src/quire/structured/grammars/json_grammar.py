"""A JSON schema as a grammar: properties in the schema's order, bounded blanks, numbers that fit their types.

Called by the engines' compile step. An object that names its properties gets no others unless the schema mentions
others, and a tuple ends with its last item: fewer values than the schema allows, but what its author meant.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as combinations

from quire.errors import RequestError
from quire.structured.grammars import numbers
from quire.structured.grammars.alternatives import NOTHING_ASKED, Array, Contains, Goal, Object
from quire.structured.grammars.pattern import whole
from quire.structured.grammars.regular import ANYTHING, Node, both, cat, derivative, either, finite, is_empty, no, text
from quire.structured.grammars.rules import Alternative, Many, Ref, Rules, escaped, literal
from quire.structured.grammars.schema import Schema

MAX_STATES = 4000  # of one array or object whose items or properties are counted
MAX_ITEMS = 1000
MAX_FREE = 20  # properties whose names the schema does not list, where there is a maximum
MAX_ANY_ORDER = 6  # unique items may come in any order up to so many values

_HEX = "[0-9a-fA-F]"
# Written without counts: xgrammar takes tens of milliseconds for a mask where a count is near.
_ESCAPE = (
    r'["\\/bfnrt] | "u" ([0-9abcefABCEF] HEX HEX HEX | [dD] [0-7] HEX HEX | '
    r'[dD] [89abAB] HEX HEX "\\u" [dD] [c-fC-F] HEX HEX)'
).replace("HEX", _HEX)
_NUMBER = f'"-"? ("0" | [1-9] [0-9]{{0,{numbers.MAX_DIGITS - 1}}}) ("." [0-9]{{1,20}})? ([eE] [+\\-]? [0-9]{{1,2}})?'
_BARE_NAME = re.compile(r"""[^\s:,{}\[\]<>"]+""")  # can be told from what follows it without quotes
_WORD = "[a-zA-Z_$][a-zA-Z0-9_$\\-]*"
_INTEGER = f'"0" | "-"? [1-9] [0-9]{{0,{numbers.MAX_DIGITS - 1}}}'


BLANKS = {"blank": '"" | " " | "\\n" [ \\t]{0,16}', "colon": '":" " "?'}  # their number is bounded
NO_BLANKS = {"blank": '""', "colon": '":"'}
_BLANK = whole(r"[ \t\n\r]*")


def blanks_of(pattern: str) -> Node:
    """What a pattern of blanks stands for; RequestError if it matches anything else, or nothing at all."""
    try:
        node = whole(pattern)
        if is_empty(node) or not is_empty(both(node, no(_BLANK))):
            raise RequestError("whitespace_pattern must match blanks only: spaces, tabs and line breaks.")
    except RecursionError:
        raise RequestError("the whitespace_pattern is nested too deeply.") from None
    return node


def _basics() -> dict[str, str]:
    return {
        "escape": _ESCAPE,
        "string": r""""\"" characters""",
        # The lookahead names what follows a string: without it every token with a quote in it is tried for each mask.
        "characters": f"({characters('characters')}) (= [ \\n\\t\\r]* [,}}\\]:])",
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


def json_grammar(schema_text: str, blanks: str | None = None) -> str:
    """GBNF whose every text is JSON that satisfies the schema; RequestError if it cannot be written, or is empty.

    `blanks`: a pattern of those between the parts; empty: none; None: a line break and an indentation, or a space, or
    nothing."""

    def written() -> str | None:
        grammar = _Grammar(Schema(schema_text), blanks)
        root = grammar.value(grammar.schema.root)
        grammar.rules.give_own("string", '"\\""', characters)
        return grammar.rules.gbnf(root)

    return _checked(written)


def untyped_grammar(schema_text: str, no_string: str, blanks: str | None = None) -> str:
    """As `json_grammar`, but a value that is a string is its bare text; nested ones are JSON.

    `no_string` is a pattern of the texts that a reader would take for something else.
    """

    def written() -> str | None:
        grammar = _Grammar(Schema(schema_text), blanks)
        return grammar.rules.gbnf(grammar.untyped(grammar.schema.root, no(whole(no_string))))

    return _checked(written)


def quoted_grammar(schema_text: str, quote: str) -> str:
    """As `json_grammar`, but strings are bare text between marks, and names of properties are bare words."""

    def written() -> str | None:
        grammar = _OtherQuotes(Schema(schema_text), quote)
        return grammar.rules.gbnf(grammar.value(grammar.schema.root))

    return _checked(written)


def _checked(write: Callable[[], str | None]) -> str:
    try:
        text = write()
    except RecursionError:
        raise RequestError("the schema is nested too deeply.") from None
    if text is None:
        raise RequestError(
            "no JSON value satisfies the schema: look for false, empty enums and keywords that contradict."
        )
    return text


class _Grammar:
    HAS_BASIC_VALUE = True  # a rule for any value is among those already written

    def __init__(self, schema: Schema, blanks: str | None) -> None:
        self.schema = schema
        self.rules = Rules(_basics() | (NO_BLANKS if blanks == "" else {"colon": '":" blank'} if blanks else BLANKS))
        if blanks:
            self.rules.define("blank", blanks_of(blanks))
        self._refs: dict[Goal, Ref] = {}
        self._pending: list[tuple[Goal, Ref]] = []

    def value(self, goal: Goal) -> Ref:
        """The rule for values that reach a goal; adds the rules of all goals that it leads to as well."""
        ref = self._ref(goal)
        self._add_pending()
        return ref

    def untyped(self, goal: Goal, texts: Node) -> Ref:
        """The same where a string is one of the texts, without quotes."""
        ref = self.rules.add("untyped", self._alternatives(goal, texts))
        self._add_pending()
        return ref

    def _add_pending(self) -> None:
        while self._pending:
            goal, pending = self._pending.pop()
            self.rules.add(pending.rule, self._alternatives(goal))

    def _ref(self, goal: Goal) -> Ref:
        if not goal and self.HAS_BASIC_VALUE:
            return Ref("value")
        if goal not in self._refs:
            self._refs[goal] = ref = Ref(f"v{len(self._refs)}")
            self._pending.append((goal, ref))
        return self._refs[goal]

    def _alternatives(self, goal: Goal, texts: Node | None = None) -> list[Alternative]:
        result: list[Alternative] = []
        for alternative in self.schema.alternatives(goal):
            result += [(literal(word),) for word in ("null", "true", "false") if word in alternative.kinds]
            if "string" in alternative.kinds and texts is None:
                result += self._string(alternative.string)
            elif "string" in alternative.kinds and texts is not None:
                result.append((self.rules.language(both(alternative.string or ANYTHING, texts), quoted=False),))
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
            return [(literal(self._spelled(word)),) for word in sorted(words)]
        return [('"\\""', self.rules.language(node, quoted=True))]

    def _spelled(self, word: str) -> str:
        """A string as it is written."""
        return f'"{escaped(word)}"'

    def _name(self, name: str) -> str:
        """A property's name as it is written."""
        return self._spelled(name)

    def _names(self, node: Node) -> list[Alternative]:
        return self._string(node)

    def _number(self, node: Node | None) -> list[Alternative]:
        if node is None or node is numbers.INTEGER:
            return [(Ref("number" if node is None else "integer"),)]
        words = finite(node)
        if words is not None:
            return [(literal(word),) for word in sorted(words)]
        return [(self.rules.language(both(node, numbers.SPELLINGS), quoted=False),)]

    # Objects: one rule for each position among the named properties and number of properties written so far.

    def _object(self, shape: Object) -> Ref:
        named = list(dict.fromkeys([*shape.properties, *shape.required]))
        goals = {name: self._goal_of(shape, name) for name in named}
        free = [] if self._is_closed(shape, goals) else self._free(shape, named)
        if free and shape.low > len(named) + 1:
            raise RequestError(
                f"minProperties {shape.low} asks for more properties than are named: list them under properties."
            )
        cap = max(shape.low, shape.high or 0, 1)  # larger counts are all alike
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
                name = named[position]
                following: list[Alternative] = []
                if shape.high is None or count < shape.high:
                    member = (literal(self._name(name)), Ref("colon"), self._ref(goals[name]))
                    after = Ref(f"{stem}_{position + 1}_{min(count + 1, cap)}")
                    following.append((*_before(count), *member, after))
                if name not in shape.required:
                    following.append((Ref(f"{stem}_{position + 1}_{count}"),))
                self.rules.add(state, following)
        return Ref(f"{stem}_0_0")

    def _last(self, shape: Object, free: list[Alternative], count: int) -> list[Alternative]:
        """After the named properties. Free names may repeat, so they add one at least, however many there are."""
        result: list[Alternative] = [_after(count, '"}"')] if count >= shape.low else []
        room = None if shape.high is None else shape.high - count
        may_add_one = count + 1 >= shape.low and room != 0
        if free and may_add_one:
            member = self.rules.add(self.rules.new("f"), free)
            another: Alternative = ('","', Ref("blank"), member)
            if room is None:
                result.append((*_before(count), member, Many(another), Ref("blank"), '"}"'))
            for num_more in range(min(room or 0, MAX_FREE)):
                result.append((*_before(count), member, *(another * num_more), Ref("blank"), '"}"'))
        return result

    def _goal_of(self, shape: Object, name: str) -> Goal:
        goal = shape.properties.get(name, NOTHING_ASKED)
        for node, asked in shape.patterns:
            goal |= asked if _matches(node, name) else NOTHING_ASKED
        for rest in shape.rest:
            is_described = name in rest.names or any(_matches(node, name) for node in rest.patterns)
            if not is_described:
                goal |= rest.goal
        allowed = all(_matches(node, name) for node in shape.names)
        return goal if allowed else goal | {(self.schema.document.never, True)}

    def _is_closed(self, shape: Object, goals: dict[str, Goal]) -> bool:
        """Whether the object gets no other properties than those that are named."""
        never = (self.schema.document.never, True)
        names_some = any(never not in goals[name] for name in shape.properties)
        mentions_others = bool(shape.patterns or shape.rest)
        return names_some and not mentions_others and shape.low <= len(goals)

    def _free(self, shape: Object, named: list[str]) -> list[Alternative]:
        """Members whose names the schema does not list, by what holds for them."""
        unnamed = both(*shape.names, no(either(*map(text, named))))
        tests = list(shape.patterns)  # names, and what is asked of members that have them
        for rest in shape.rest:
            others = both(no(either(*map(text, rest.names))), *map(no, rest.patterns))
            tests.append((others, rest.goal))
        tests = [(names, asked) for names, asked in tests if asked]
        if len(tests) > 6:
            raise RequestError("patternProperties: more than 6 patterns for one object are not supported.")
        result: list[Alternative] = []
        for matched in combinations((True, False), repeat=len(tests)):
            found, goal = unnamed, NOTHING_ASKED
            for is_matched, (names, asked) in zip(matched, tests):
                found = both(found, names if is_matched else no(names))
                goal |= asked if is_matched else NOTHING_ASKED
            if (self.schema.document.never, True) in goal or is_empty(found):
                continue
            result += [(*key, Ref("colon"), self._ref(goal)) for key in self._names(found)]
        return result

    # Arrays.

    def _array(self, shape: Array) -> Ref:
        high = shape.high
        is_tuple = shape.open and shape.prefix and not shape.contains
        if is_tuple and shape.low <= len(shape.prefix):
            high = len(shape.prefix) if high is None else min(high, len(shape.prefix))
        may_have_two = high is None or high > 1
        if shape.unique and may_have_two:
            return self._unique(shape, high)
        if shape.contains:
            return self._counting(shape, high)
        stem = self.rules.new("a")
        for position, goal in enumerate(shape.prefix):
            following: list[Alternative] = [_after(position, '"]"')] if position >= shape.low else []
            if high is None or position < high:
                following.append((*_before(position), self._ref(goal), Ref(f"{stem}_{position + 1}")))
            self.rules.add(f"{stem}_{position}", following)
        self._tail(stem, shape, high)
        return Ref(f"{stem}_0")

    def _tail(self, stem: str, shape: Array, high: int | None) -> None:
        """The items after the prefix: one rule for each that is counted, the last one for all that are not."""
        length = len(shape.prefix)
        item = self._ref(shape.items)
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
        """`contains`: a state is the position and, for each `contains`, how many items satisfied it so far."""
        last = max(len(shape.prefix), shape.low, 1) if high is None else high  # later positions are all alike
        limits = [max(each.low, each.high or 0) for each in shape.contains]
        num_states = (last + 1) * math.prod(limit + 1 for limit in limits)
        if num_states > MAX_STATES or len(limits) > 3:
            raise RequestError(
                "contains with counts this large is not supported: lower minContains, maxContains or maxItems."
            )
        stem = self.rules.new("c")
        for position in range(last + 1):
            for counts in combinations(*(range(limit + 1) for limit in limits)):
                is_satisfied = all(count >= each.low for count, each in zip(counts, shape.contains))
                may_end = is_satisfied and position >= shape.low
                following: list[Alternative] = [_after(position, '"]"')] if may_end else []
                if high is None or position < high:
                    next_state = partial(_state, stem, min(position + 1, last))
                    following += self._counted_items(shape, position, counts, next_state)
                self.rules.add(_state(stem, position, counts), following)
        return Ref(_state(stem, 0, (0,) * len(limits)))

    def _counted_items(
        self, shape: Array, position: int, counts: tuple[int, ...], next_state: Callable[[tuple[int, ...]], str]
    ) -> Iterator[Alternative]:
        """An item at this position, each time of another kind, and the state it leads to."""
        for goal, after in _choices(shape.contains, counts):
            item = self._ref(goal | shape.at(position))
            yield (*_before(position), item, Ref(next_state(after)))

    def _listed_items(self, shape: Array) -> list[list[str]]:
        """The values that are allowed at each position of the prefix, then those of later items."""
        goals = (*shape.prefix, shape.items)
        listed = [self._values(goal) for goal in goals]
        positions = [values for values in listed if values is not None]
        if shape.contains or len(positions) < len(goals):
            raise RequestError(
                "uniqueItems is only supported where the items are an enum, constants or booleans: remove it."
            )
        return positions

    def _unique(self, shape: Array, high: int | None) -> Ref:
        positions = self._listed_items(shape)
        values = list(dict.fromkeys(value for allowed in positions for value in allowed))
        any_order = len(values) <= MAX_ANY_ORDER
        if not any_order and shape.prefix:
            raise RequestError(
                f"uniqueItems with prefixItems of more than {MAX_ANY_ORDER} values is not supported: remove it."
            )
        stem = self.rules.new("u")
        # A state is the number of items so far, and the indices of the values that may not follow.
        start: tuple[int, frozenset[int]] = (0, frozenset())
        names = {start: f"{stem}_0"}
        queue = [start]
        for count, used in queue:  # grows as it is read
            following: list[Alternative] = [_after(count, '"]"')] if count >= shape.low else []
            is_full = high is not None and count >= high
            allowed = [] if is_full else positions[min(count, len(shape.prefix))]
            for index, value in enumerate(values):
                if value not in allowed or index in used:
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
            if "string" in alternative.kinds:
                texts = finite(alternative.string) if alternative.string is not None else None
                if texts is None:
                    return None
                result += [self._spelled(word) for word in sorted(texts)]
            if "number" in alternative.kinds:
                spellings = finite(alternative.number) if alternative.number is not None else None
                if spellings is None:
                    return None
                result += sorted(spellings)
        return result


class _OtherQuotes(_Grammar):
    """Strings stand between marks of another kind, and nothing in them is escaped."""

    HAS_BASIC_VALUE = False

    def __init__(self, schema: Schema, quote: str) -> None:
        super().__init__(schema, blanks="")
        self._quote = quote
        self._texts = no(cat(ANYTHING, text(quote), ANYTHING))
        # Where a string is limited otherwise, a product of both would have too many states.
        self._simpler_texts = no(cat(ANYTHING, text(quote[0]), ANYTHING))

    def _string(self, node: Node | None) -> list[Alternative]:
        words = finite(node) if node is not None else None
        if words is not None:
            return [(literal(self._spelled(word)),) for word in sorted(words) if self._quote not in word]
        mark = literal(self._quote)
        texts = self._texts if node is None or node is ANYTHING else both(node, self._simpler_texts)
        return [(mark, self.rules.language(texts, quoted=False), mark)]

    def _spelled(self, word: str) -> str:
        return f"{self._quote}{word}{self._quote}"

    def _name(self, name: str) -> str:
        if not _BARE_NAME.fullmatch(name):
            raise RequestError(f"{name!r:.60} cannot be a property's name where names have no quotes: rename it.")
        return name

    def _names(self, node: Node) -> list[Alternative]:
        return [(self.rules.language(both(node, whole(_WORD)), quoted=False),)]


def _before(count: int) -> Alternative:
    """What comes before an item or property, after `count` others."""
    return ('","', Ref("blank")) if count else (Ref("blank"),)


def _after(count: int, close: str) -> Alternative:
    """The end of an array or object. It is part of the rules of its content, so that something follows every value."""
    return (Ref("blank"), close) if count else (close,)


def _state(stem: str, position: int, counts: tuple[int, ...]) -> str:
    return "_".join(map(str, (stem, position, *counts)))


def _choices(contains: tuple[Contains, ...], counts: tuple[int, ...]) -> list[tuple[Goal, tuple[int, ...]]]:
    """What the next item may be, and the counts after it."""
    options: list[list[tuple[Goal, int]]] = []  # for each `contains`
    for each, count in zip(contains, counts):
        if each.high is None:
            options.append([(each.goal, min(count + 1, each.low)), (NOTHING_ASKED, count)])
        elif count < each.high:
            options.append([(each.goal, count + 1), (each.outside, count)])
        else:
            options.append([(each.outside, count)])
    result: list[tuple[Goal, tuple[int, ...]]] = []
    for choice in combinations(*options):
        goals, counts_after = zip(*choice)
        result.append((NOTHING_ASKED.union(*goals), counts_after))
    return result


def _matches(node: Node, name: str) -> bool:
    for character in name:
        node = derivative(node, ord(character))
    return node.nullable
