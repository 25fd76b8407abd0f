"""Regular expressions in ECMA-262's syntax, as JSON schemas and clients write them, into languages of `regular.py`.

Called by the schema compiler (a `pattern` is found anywhere) and for `regex` outputs (the whole text must match). What
cannot be a regular language, or is not understood, is refused by name. Must not know JSON or any engine.
"""

from quire.structured.errors import PatternError
from quire.structured.grammars.regular import (
    ANYTHING,
    BEGIN,
    EMPTY,
    END,
    LAST,
    UNICODE,
    Node,
    before_end,
    cat,
    chars,
    derivative,
    either,
    repeat,
    without,
)

MAX_REPEAT = 10_000  # also of nested counts multiplied
MAX_DEPTH = 50
_DIGIT = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)]
_SPACE += [(0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_HEX_DIGITS = set("0123456789abcdefABCDEF")
_FIRST, _LAST = chars([(BEGIN, BEGIN)]), chars([(END, END)])
_MARKED = repeat(chars([*UNICODE, (BEGIN, END)]), 0, None)


def found_in(pattern: str) -> Node:
    """Texts in which the pattern matches somewhere."""
    return either(*(_anchored(items, ANYTHING) for items in _Parser(pattern).parse()))


def whole(pattern: str) -> Node:
    """Texts which the pattern matches from end to end."""
    return either(*(_anchored(items, EMPTY) for items in _Parser(pattern).parse()))


def _anchored(items: list[Node], around: Node) -> Node:
    """A sequence with `around` before and after it, except where it begins with ^ or ends with $."""
    begins = items[:1] == [_FIRST]
    ends = items[begins:][-1:] == [_LAST]
    core = items[begins : len(items) - ends]
    if not any(map(_has_anchor, core)):
        return cat(EMPTY if begins else around, *core, EMPTY if ends else around)
    if around is EMPTY:
        return _between(cat(either(EMPTY, _FIRST), *items, either(EMPTY, _LAST)))
    return _between(cat(_MARKED, *items, _MARKED))


def _between(marked: Node) -> Node:
    """Texts which `marked` matches with BEGIN before and END after them."""
    return before_end(derivative(marked, BEGIN))


def _has_anchor(node: Node) -> bool:
    if node.kind == "chars":
        return any(high > LAST for _, high in node.args)
    return any(_has_anchor(inner) for inner in node.args if isinstance(inner, Node))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0  # the next character
        self.depth = 0  # of groups

    def parse(self) -> list[list[Node]]:
        alternatives = self._alternatives()
        if self.at < len(self.pattern):
            raise self._error("has an unmatched )")
        return alternatives

    def _error(self, what: str) -> PatternError:
        return PatternError(
            f"the regular expression {self.pattern[:60]!r} {what} (at character {self.at}): change the pattern."
        )

    def _peek(self, count: int = 1) -> str:
        return self.pattern[self.at : self.at + count]

    def _take(self) -> str:
        if self.at >= len(self.pattern):
            raise self._error("ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _alternatives(self) -> list[list[Node]]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"nests groups deeper than {MAX_DEPTH}")
        result = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            result.append(self._sequence())
        self.depth -= 1
        return result

    def _sequence(self) -> list[Node]:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            item = self._atom()
            if self._peek() and self._peek() in "*+?{":
                if _has_anchor(item):
                    raise self._error("repeats an anchor")
                item = self._quantified(item)
            is_anchor = item in (_FIRST, _LAST)
            if not is_anchor or items[-1:] != [item]:  # ^^ is ^
                items.append(item)
        return items

    def _quantified(self, item: Node) -> Node:
        sign = self._take()
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self._counts()
        if self._peek() == "?":  # lazy: the language is the same
            self.at += 1
        if self._peek() and self._peek() in "*+{":
            raise self._error("has two quantifiers in a row")
        if (high or low) * _largest_count(item) > MAX_REPEAT:
            raise self._error(f"repeats more than {MAX_REPEAT} times")
        return repeat(item, low, high)

    def _counts(self) -> tuple[int, int | None]:
        close = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at : max(close, self.at)].partition(",")
        is_valid = close > 0 and _is_count(low)
        if is_valid and high:
            is_valid = _is_count(high) and int(low) <= int(high)
        if not is_valid:
            raise self._error("has a { that is no count: escape it or write {m,n}")
        self.at = close + 1
        if not comma:
            return int(low), int(low)
        return int(low), int(high) if high else None

    def _atom(self) -> Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == ".":
            return chars(without(UNICODE, _LINE_ENDS))
        if character in "^$":
            return _FIRST if character == "^" else _LAST
        if character in "*+?{":
            raise self._error(f"has nothing before {character}")
        if character == "\\":
            return chars(self._escape())
        return chars(_one(character))

    def _group(self) -> Node:
        if self._peek() == "?":
            self.at += 1
            mark = self._take()
            if mark == "<" and self._peek() not in ("=", "!"):
                self.at = self.pattern.find(">", self.at) + 1 or len(self.pattern)
            elif mark != ":":
                raise self._error("uses a lookaround or a flag, which is not supported")
        inner = either(*(cat(*items) for items in self._alternatives()))
        if self._take() != ")":
            raise self._error("has an unmatched (")
        return inner

    def _escape(self, in_class: bool = False) -> list[tuple[int, int]]:
        letter = self._take()
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else without(UNICODE, ranges)
        if letter in _CONTROLS:
            return [(_CONTROLS[letter], _CONTROLS[letter])]
        if letter in "xu":
            point = self._code_point(letter)
            return [(point, point)]
        if letter == "c":
            point = ord(self._take()) % 32
            return [(point, point)]
        if letter == "b" and in_class:
            return [(8, 8)]
        if letter.isalnum():
            raise self._error(f"uses \\{letter}, which is not supported")
        return _one(letter)

    def _code_point(self, kind: str) -> int:
        if kind == "u" and self._peek() == "{":
            close = self.pattern.find("}", self.at)
            if close < 0:
                raise self._error("has a \\u{ without its }")
            digits = self.pattern[self.at + 1 : close]
            self.at = close + 1
        else:
            width = 2 if kind == "x" else 4
            digits = self._peek(width) if len(self._peek(width)) == width else ""
            self.at += width
        is_hex = 0 < len(digits) <= 6 and set(digits) <= _HEX_DIGITS
        if not is_hex or int(digits, 16) > LAST:
            raise self._error(f"has a bad \\{kind} escape")
        if 0xD800 <= int(digits, 16) <= 0xDFFF:
            raise self._error("names half of a surrogate pair: write \\u{…}")
        return int(digits, 16)

    def _class(self) -> Node:
        negated = self._peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            item = self._class_item()
            if self._peek() == "-" and self._peek(2) != "-]":
                self.at += 1
                last = self._class_item()
                are_single = len(item) == len(last) == 1 and item[0][0] == item[0][1]
                if not are_single or last[0][1] < item[0][0]:
                    raise self._error("has a range out of order")
                item = [(item[0][0], last[0][1])]
            ranges += item
        self.at += 1
        return chars(without(UNICODE, ranges) if negated else ranges)

    def _class_item(self) -> list[tuple[int, int]]:
        character = self._take()
        return self._escape(in_class=True) if character == "\\" else _one(character)


def _one(character: str) -> list[tuple[int, int]]:
    return [(ord(character), ord(character))]


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= 9


def _largest_count(node: Node) -> int:
    """How often the innermost character may be repeated by counts."""
    largest = max((_largest_count(inner) for inner in node.args if isinstance(inner, Node)), default=1)
    if node.kind != "repeat":
        return largest
    _, low, high = node.args
    return largest * max(low, high or 1, 1)
