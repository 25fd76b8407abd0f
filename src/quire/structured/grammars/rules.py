"""A grammar under construction: rules of alternatives, pruned of what can never end, written as GBNF for an engine.

Rules come from `json_grammar.py`, or are made here from regular languages. Must not know JSON, except how characters
are spelled inside its strings.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.errors import RequestError
from quire.structured.grammars.regular import Node, automaton, without

MAX_RULES = 20_000
MAX_STRING_STATES = 300  # an engine spends milliseconds on each
MAX_OWN = 16  # copies of a basic rule
MAX_TEXT_CHARS = 4_000_000


class Ref(NamedTuple):
    rule: str


class Many(NamedTuple):
    """Any number of times."""

    symbols: tuple


Symbol = str | Ref | Many  # a string is GBNF that needs no rule
Alternative = tuple[Symbol, ...]
Spelling = Callable[[Iterable[tuple[int, int]]], str]  # how one character of some ranges is written


class Rules:
    def __init__(self, basics: dict[str, str] | None = None) -> None:
        self._basics = basics or {}  # rules already written, which all end
        self._rules: dict[str, list[Alternative]] = {}
        self._languages: dict[tuple[Node, bool], Ref] = {}
        self._num_own = 0
        self._kept: list[str] = []  # rules that the basic ones refer to

    def new(self, stem: str) -> str:
        return f"{stem}{len(self._rules)}"

    def add(self, name: str, alternatives: Iterable[Alternative]) -> Ref:
        if len(self._rules) >= MAX_RULES:
            raise RequestError("the schema or pattern is too complex: it needs too many grammar rules.")
        self._rules[name] = list(dict.fromkeys(alternatives))
        return Ref(name)

    def define(self, name: str, node: Node) -> None:
        """A rule for a regular language that basic rules refer to."""
        self.add(name, [(self.language(node, quoted=False),)])
        self._kept.append(name)

    def language(self, node: Node, quoted: bool) -> Ref:
        """A rule for a regular language; `quoted`: as characters in a JSON string, with the quote that closes it."""
        key = (node, quoted)
        if key not in self._languages:
            spell = quoted_class if quoted else plain_class
            end: Alternative = ('"\\""',) if quoted else ()
            if _is_plain(node):
                self._languages[key] = self.add(self.new("r"), [(_structured(node, spell), *end)])
            else:
                self._languages[key] = self._states(node, spell, end)
        return self._languages[key]

    def _states(self, node: Node, spell: Spelling, end: Alternative) -> Ref:
        """A rule for each state of the language's automaton."""
        machine = automaton(node)
        if end and len(machine.moves) > MAX_STRING_STATES:
            raise RequestError(
                "minLength, maxLength or the counts of a pattern are too large in this schema: "
                "lower them, or drop oneOf, not and if."
            )
        stem = self.new("s")
        if not machine.moves:
            return self.add(stem, [])
        for state in reversed(range(len(machine.moves))):
            by_target: dict[int, list[tuple[int, int]]] = {}
            for low, high, target in machine.moves[state]:
                by_target.setdefault(target, []).append((low, high))
            alternatives: list[Alternative] = []
            for target, ranges in by_target.items():
                alternatives.append((spell(ranges), Ref(f"{stem}_{target}")))
            if machine.accepting[state]:
                alternatives.append(end)
            self.add(f"{stem}_{state}", alternatives)
        return Ref(f"{stem}_0")

    def give_own(self, basic: str, opening: str, body: Callable[[str], str]) -> None:
        """Where a basic rule is followed by something, `opening` and a copy of the rule take its place.

        `body` makes the copy from its name. An engine that knows what must follow makes masks several times faster.
        Each copy costs time to compile, so only the first places get one.
        """
        aliases = {basic, *(name for name, found in self._rules.items() if found == [(Ref(basic),)])}
        for alternatives in self._rules.values():
            for idx, alternative in enumerate(alternatives):
                written: list[Symbol] = []
                for place, symbol in enumerate(alternative):
                    is_followed = place < len(alternative) - 1
                    is_basic = isinstance(symbol, Ref) and symbol.rule in aliases
                    gets_own = is_basic and is_followed and self._num_own < MAX_OWN
                    if not gets_own:
                        written.append(symbol)
                        continue
                    own = f"own{self._num_own}"
                    self._num_own += 1
                    self._basics[own] = body(own)
                    written += [opening, Ref(own)]
                alternatives[idx] = tuple(written)

    def gbnf(self, root: Ref) -> str | None:
        """The rules that the root needs; None if no finite text can be made."""
        ending = self._ending()
        if root.rule not in ending:
            return None
        lines = [f"root ::= {root.rule}", *(f"{name} ::= {body}" for name, body in self._basics.items())]
        queue = [name for name in dict.fromkeys([root.rule, *self._kept]) if name not in self._basics]
        queued = {*queue, *self._basics}
        for name in queue:  # grows as it is read
            kept = [alternative for alternative in self._rules[name] if self._ends(alternative, ending)]
            written = [" ".join(map(_written, alternative)) or '""' for alternative in kept]
            lines.append(f"{name} ::= " + " | ".join(written))
            for found in _references(kept):
                if found in ending and found not in queued:
                    queued.add(found)
                    queue.append(found)
        text = "\n".join(lines) + "\n"
        if len(text) > MAX_TEXT_CHARS:
            raise RequestError("the schema or pattern is too complex: its grammar grows too long.")
        return text

    def _ending(self) -> set[str]:
        """Rules from which a finite text can be made."""
        users: dict[str, set[str]] = {}
        for name, alternatives in self._rules.items():
            for found in _references(alternatives):
                users.setdefault(found, set()).add(name)
        ending = set(self._basics)
        queue = list(self._rules)
        while queue:
            name = queue.pop()
            if name in ending:
                continue
            if any(self._ends(alternative, ending) for alternative in self._rules[name]):
                ending.add(name)
                queue += users.get(name, ())
        return ending

    def _ends(self, alternative: Alternative, ending: set[str]) -> bool:
        return all(symbol.rule in ending for symbol in alternative if isinstance(symbol, Ref))


def _references(alternatives: Iterable[Alternative]) -> Iterable[str]:
    for alternative in alternatives:
        for symbol in alternative:
            if isinstance(symbol, Ref):
                yield symbol.rule
            elif isinstance(symbol, Many):
                yield from _references([symbol.symbols])


def _written(symbol: Symbol) -> str:
    if isinstance(symbol, Ref):
        return symbol.rule
    if isinstance(symbol, Many):
        return f"({' '.join(map(_written, symbol.symbols))})*"
    return symbol


def _is_plain(node: Node) -> bool:
    """Whether the expression can be written in GBNF as it stands.

    Intersections and complements cannot. Counts could, but engines expand `{m,n}` in ways that make some masks take
    seconds, while the states of an automaton are all cheap.
    """
    while node.kind == "cat":
        if not _is_plain(node.args[0]):
            return False
        node = node.args[1]
    if node.kind in ("and", "not", "mod", "ends", "none"):
        return False
    if node.kind == "repeat":
        _, low, high = node.args
        if low > 1 or high not in (None, 1):
            return False
    return all(_is_plain(inner) for inner in node.args if isinstance(inner, Node))


def _structured(node: Node, spell: Spelling) -> str:
    """A plain expression in GBNF."""
    if node.kind == "cat":
        parts = []
        while node.kind == "cat":
            parts.append(_structured(node.args[0], spell))
            node = node.args[1]
        return " ".join([*parts, _structured(node, spell)])
    if node.kind == "or":
        return "(" + " | ".join(_structured(part, spell) for part in node.args) + ")"
    if node.kind == "repeat":
        inner, low, high = node.args
        if high:
            return f"({_structured(inner, spell)})?"
        return f"({_structured(inner, spell)}){'+' if low else '*'}"
    return spell(node.args) if node.kind == "chars" else '""'


def literal(text: str) -> str:
    return '"' + "".join(map(_character, map(ord, text))) + '"'


def plain_class(ranges: Iterable[tuple[int, int]]) -> str:
    written = "["
    for low, high in without(ranges, [(0xD800, 0xDFFF)]):
        written += _character(low) if low == high else f"{_character(low)}-{_character(high)}"
    return written + "]"


_SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED = [(0, 31), (34, 34), (92, 92)]


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string: one spelling for each character."""
    points = map(ord, text)
    return "".join(_json_escape(point) if _is_in(point, _ESCAPED) else chr(point) for point in points)


def quoted_class(ranges: Iterable[tuple[int, int]]) -> str:
    """One character of these as it stands inside a JSON string."""
    ranges = tuple(ranges)
    plain = without(ranges, _ESCAPED)
    parts = [plain_class(plain)] if plain else []
    for low, high in _ESCAPED:
        parts += [literal(_json_escape(point)) for point in range(low, high + 1) if _is_in(point, ranges)]
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _is_in(point: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(low <= point <= high for low, high in ranges)


def _json_escape(point: int) -> str:
    return "\\" + _SHORT_ESCAPES[point] if point in _SHORT_ESCAPES else f"\\u{point:04x}"


def _character(point: int) -> str:
    character = chr(point)
    is_letter = character.isascii() and character.isalnum()
    if is_letter or character in " _,:;{}()<>=/.!#%&@'`~+*?|":
        return character
    # Not \x: engines read any number of digits after it.
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"
