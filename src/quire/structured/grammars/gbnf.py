"""llama.cpp's grammar language (GBNF), read as llama.cpp reads it and written anew as rules that the engines take.

Called by the engines when they lower a spec, in the process that may die: engines have dialects of their own, in which
the same text can mean something else. Must not know an engine.
"""

import re
from collections.abc import Iterable
from typing import NoReturn

from quire.errors import RequestError
from quire.structured.grammars.regular import UNICODE, without
from quire.structured.grammars.rules import Alternative, Ref, Rules, Symbol, literal, plain_class
from quire.structured.spec import MAX_COUNT, MAX_GROUPS

MAX_COPIES = 100_000  # symbols that counts make, in one grammar
LAST = UNICODE[-1][1]

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_HEAD = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_CLASS = re.compile(r"\[(\^?)((?:[^\]\\]|\\.)*)\]", re.DOTALL)
_TIMES = re.compile(r"[*+?]|\{[ \t]*([0-9]{1,9})[ \t]*(?:(,)[ \t]*([0-9]{1,9})?[ \t]*)?\}")
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([trn\\\"\[\]-]))|([^\\])", re.DOTALL
)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}


def gbnf_grammar(text: str) -> str:
    """The grammar with everything spelled out; RequestError says what is wrong with it."""
    return _Reader(text).grammar()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.rule = ""  # the one that is read
        self.depth = 0  # of parentheses
        self.num_copies = 0
        self.rules = Rules()
        self.names: dict[str, str] = {}  # of its rules, and what they are called in the result
        self.defined: set[str] = set()

    def grammar(self) -> str:
        self._skip(lines=True)
        while self.place < len(self.text):
            self._rule()
        if missing := [name for name in self.names if name not in self.defined]:
            raise RequestError(f"the grammar uses the rule {missing[0]!r:.60} and does not define it.")
        if "root" not in self.defined:
            raise RequestError("the grammar has no rule named root, which is where it begins.")
        written = self.rules.gbnf(self._named("root"))
        if written is None:
            raise RequestError("the grammar allows no output: its root never ends.")
        return written

    def _rule(self) -> None:
        head = _HEAD.match(self.text, self.place)
        if head is None:
            self._fail("a rule must begin here, as in name ::=")
        self.rule = head[1]
        self.place = head.end()
        self._skip(lines=True)
        alternatives = self._alternatives()
        self.rules.add(self._named(head[1]).rule, alternatives)  # of two with the same name the later one counts
        self.defined.add(head[1])
        if self.place < len(self.text) and self.text[self.place] not in "\r\n":
            self._fail("this is not part of a rule")
        self._skip(lines=True)

    def _alternatives(self) -> list[Alternative]:
        alternatives = [self._sequence()]
        while self._continues():
            self.place += 1
            self._skip(lines=True)
            alternatives.append(self._sequence())
        return alternatives

    def _continues(self) -> bool:
        """Whether another alternative follows, on this line or at the beginning of the next."""
        end = self._after_space(lines=True)
        if self.text[end : end + 1] != "|":
            return False
        self.place = end
        return True

    def _sequence(self) -> Alternative:
        symbols: list[Symbol] = []
        while (item := self._item()) is not None:
            self._skip(lines=self.depth > 0)
            while times := _TIMES.match(self.text, self.place):
                item = self._repeated(item, times)
                self.place = times.end()
                self._skip(lines=self.depth > 0)
            symbols += item
        return tuple(symbols)

    def _item(self) -> Alternative | None:
        """What stands here, without the count behind it; None where nothing does."""
        match self.text[self.place : self.place + 1]:
            case '"':
                return self._literal()
            case "[":
                return (self._class(),)
            case ".":
                self.place += 1
                return (plain_class(UNICODE),)
            case "(":
                return self._group()
            case "<" | "!":
                self._fail("tokens cannot be named here: write the text they spell")
            case "*" | "+" | "?" | "{":
                self._fail("a count like this must follow what it counts, and be at most 9 digits long")
        name = _NAME.match(self.text, self.place)
        if name is None:
            return None
        self.place = name.end()
        return (self._named(name[0]),)

    def _literal(self) -> Alternative:
        found = _LITERAL.match(self.text, self.place)
        if found is None:
            self._fail("a text in quotes does not end")
        points = self._characters(found[1])
        self.place = found.end()
        return (literal("".join(chr(point) for point, _ in points)),) if points else ()

    def _class(self) -> str:
        found = _CLASS.match(self.text, self.place)
        if found is None:
            self._fail("a list of characters in brackets does not end")
        ranges = _united(self._ranges(self._characters(found[2])))
        if found[1]:
            ranges = _others(ranges)
        if not without(ranges, [(UNICODE[0][1] + 1, UNICODE[1][0] - 1)]):
            self._fail("no character is in these brackets")
        self.place = found.end()
        return plain_class(ranges)

    def _ranges(self, points: list[tuple[int, bool]]) -> Iterable[tuple[int, int]]:
        dash = (ord("-"), False)
        idx = 0
        while idx < len(points):
            low = high = points[idx][0]
            if points[idx + 1 : idx + 2] == [dash] and idx + 2 < len(points):
                high = points[idx + 2][0]
                idx += 2
            if high < low:
                self._fail("a range in brackets ends before it begins")
            yield low, high
            idx += 1

    def _characters(self, text: str) -> list[tuple[int, bool]]:
        """Code points, and whether they were written with a backslash."""
        points: list[tuple[int, bool]] = []
        end = 0
        while end < len(text):
            found = _CHARACTER.match(text, end)
            if found is None:
                self._fail(
                    f'{text[end : end + 2]!r} means nothing: there are \\n \\r \\t \\\\ \\" \\[ \\] \\- \\x \\u \\U'
                )
            digits = found[1] or found[2] or found[3]
            if digits:
                point = int(digits, 16)
            else:
                point = ord(_ESCAPES.get(found[4], found[4]) if found[4] else found[5])
            if point > LAST or 0xD800 <= point <= 0xDFFF:
                self._fail(f"{found[0]} is no character")
            points.append((point, found[5] is None))
            end = found.end()
        return points

    def _group(self) -> Alternative:
        start = self.place
        self.depth += 1
        if self.depth > MAX_GROUPS:
            self._fail(f"parentheses nest deeper than {MAX_GROUPS} levels")
        self.place += 1
        self._skip(lines=True)
        alternatives = self._alternatives()
        self._skip(lines=True)
        if self.text[self.place : self.place + 1] != ")":
            self.place = start if self.place >= len(self.text) else self.place
            self._fail("a parenthesis is not closed")
        self.place += 1
        self.depth -= 1
        return alternatives[0] if len(alternatives) == 1 else (self._new(alternatives),)

    def _repeated(self, item: Alternative, times: re.Match[str]) -> Alternative:
        """What is counted, so many times: a rule for each time that may be left out."""
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(times[0], (0, 0))
        if times[1] is not None:
            low = int(times[1])
            high = low if times[2] is None else int(times[3]) if times[3] is not None else None
        if max(low, high or 0) > MAX_COUNT:
            self._fail(f"something is repeated more than {MAX_COUNT} times")
        if high is not None and high < low:
            self._fail("a count ends before it begins")
        if len(item) > 1:
            item = (self._new([item]),)
        self.num_copies += low + (high or 0)
        if self.num_copies > MAX_COPIES:
            self._fail("the counts of this grammar add up to too much: lower them")
        if not item:
            return item
        return item * low + (self._any_number(item) if high is None else self._up_to(item, high - low))

    def _any_number(self, item: Alternative) -> Alternative:
        (symbol,) = item
        if isinstance(symbol, str) and symbol.endswith("]"):  # a list of characters
            return (f"{symbol}*",)
        name = self.rules.new("m")
        return (self.rules.add(name, [(symbol, Ref(name)), ()]),)

    def _up_to(self, item: Alternative, count: int) -> Alternative:
        rest: Alternative = ()
        for _ in range(count):
            rest = (self._new([(*item, *rest), ()]),)
        return rest

    def _new(self, alternatives: list[Alternative]) -> Ref:
        return self.rules.add(self.rules.new("g"), alternatives)

    def _named(self, name: str) -> Ref:
        return Ref(self.names.setdefault(name, f"n{len(self.names)}"))

    def _skip(self, lines: bool) -> None:
        self.place = self._after_space(lines)

    def _after_space(self, lines: bool) -> int:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.place)
        return found.end() if found is not None else self.place

    def _fail(self, what: str) -> NoReturn:
        where = f", in the rule {self.rule!r:.60}" if self.rule else ""
        here = self.text[self.place : self.place + 40]
        raise RequestError(f"the grammar cannot be read{where}, at {here!r:.30}: {what}.")


def _united(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, none touching another."""
    united: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if united and low <= united[-1][1] + 1:
            united[-1] = (united[-1][0], max(high, united[-1][1]))
        else:
            united.append((low, high))
    return united


def _others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters that are in none of these ranges, which are in order."""
    others: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if start < low:
            others.append((start, low - 1))
        start = high + 1
    return [*others, (start, LAST)] if start <= LAST else others
