"""Regular languages of characters as expressions closed under union, intersection and complement.

What `pattern`, lengths, number ranges and property names of a JSON schema become: the schema compiler combines them,
asks whether a language is empty and gets an automaton. Must not know JSON: characters are those of the decoded text.
"""

from collections.abc import Iterable
from weakref import WeakValueDictionary

from quire.errors import RequestError

MAX_STATES = 3000  # of one automaton; beyond it a request is refused
LAST = 0x10FFFF
BEGIN, END = LAST + 1, LAST + 2  # the characters that ^ and $ match: before the first and after the last of the text
Ranges = tuple[tuple[int, int], ...]  # inclusive, sorted, disjoint


class Node:
    """One language. Equal expressions are the same object, so that an automaton finds the states it has by identity."""

    __slots__ = ("kind", "args", "nullable", "_cuts", "__weakref__")
    _all: "WeakValueDictionary[tuple, Node]" = WeakValueDictionary()

    kind: str
    args: tuple
    nullable: bool  # contains the empty text
    _cuts: frozenset[int] | None  # see the function `_cuts`


def _node(kind: str, args: tuple, nullable: bool) -> Node:
    key = (kind, args)
    node = Node._all.get(key)
    if node is None:
        node = Node()
        node.kind = kind
        node.args = args
        node.nullable = nullable
        node._cuts = None
        Node._all[key] = node
    return node


NONE = _node("none", (), False)
EMPTY = _node("empty", (), True)


def chars(ranges: Iterable[tuple[int, int]]) -> Node:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        elif low <= high:
            merged.append((low, high))
    return _node("chars", tuple(merged), False) if merged else NONE


def without(universe: Iterable[tuple[int, int]], holes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    remaining = list(universe)
    for low, high in holes:
        parts: list[tuple[int, int]] = []
        for first, last in remaining:
            parts += [(first, min(last, low - 1)), (max(first, high + 1), last)]
        remaining = [(first, last) for first, last in parts if first <= last]
    return remaining


UNICODE: Ranges = ((0, 0xD7FF), (0xE000, LAST))  # no text holds half of a surrogate pair
CHAR = chars(UNICODE)


def cat(*nodes: Node) -> Node:
    result = EMPTY
    for node in reversed(nodes):
        result = _cat(node, result)
    return result


def _cat(a: Node, b: Node) -> Node:
    if NONE in (a, b):
        return NONE
    if a is EMPTY or b is EMPTY:
        return b if a is EMPTY else a
    spine = []
    while a.kind == "cat":  # nested to the right: a derivative then only changes the head
        spine.append(a.args[0])
        a = a.args[1]
    result = _node("cat", (a, b), a.nullable and b.nullable)
    for head in reversed(spine):
        result = _node("cat", (head, result), head.nullable and result.nullable)
    return result


def either(*nodes: Node) -> Node:
    parts: dict[Node, None] = {}
    for node in nodes:
        parts.update(dict.fromkeys(node.args if node.kind == "or" else (node,)))
    parts.pop(NONE, None)
    if ANYTHING in parts:
        return ANYTHING
    if len(parts) <= 1:
        return next(iter(parts), NONE)
    return _node("or", tuple(sorted(parts, key=id)), any(part.nullable for part in parts))


def both(*nodes: Node) -> Node:
    parts: dict[Node, None] = {}
    for node in nodes:
        parts.update(dict.fromkeys(node.args if node.kind == "and" else (node,)))
    parts.pop(ANYTHING, None)
    if NONE in parts:
        return NONE
    if len(parts) <= 1:
        return next(iter(parts), ANYTHING)
    return _node("and", tuple(sorted(parts, key=id)), all(part.nullable for part in parts))


def no(node: Node) -> Node:
    if node.kind == "not":
        return node.args[0]
    if node is ANYTHING or node is NONE:
        return NONE if node is ANYTHING else ANYTHING
    return _node("not", (node,), not node.nullable)


def repeat(node: Node, low: int, high: int | None) -> Node:
    if high == 0 or node is EMPTY:
        return EMPTY
    if node is NONE:
        return EMPTY if low == 0 else NONE
    is_star = node.kind == "repeat" and node.args[1:] == (0, None)
    if (low, high) == (1, 1) or (is_star and low < 2):
        return node
    return _node("repeat", (node, 0 if node.nullable else low, high), node.nullable or low == 0)


def remainder(divisor: int, places: int, rest: int = 0, fraction: int = -1, started: bool = False) -> Node:
    """Unsigned decimals with up to `places` digits after the point that are multiples of divisor / 10**places."""
    remaining = places - max(fraction, 0)
    is_multiple = rest * 10**remaining % divisor == 0
    may_end = started and fraction != 0  # not before a digit, nor right after the point
    return _node("mod", (divisor, places, rest, fraction, started), may_end and is_multiple)


def before_end(node: Node) -> Node:
    """Texts which `node` matches when END follows them."""
    return NONE if node is NONE else _node("ends", (node,), derivative(node, END).nullable)


def text(string: str) -> Node:
    return cat(*(chars([(ord(character), ord(character))]) for character in string))


ANYTHING = _node("repeat", (CHAR, 0, None), True)


def derivative(node: Node, c: int) -> Node:
    """The texts that may follow `c`."""
    kind, args = node.kind, node.args
    if kind == "chars":
        return EMPTY if any(low <= c <= high for low, high in args) else NONE
    if kind == "cat":
        rest = _cat(derivative(args[0], c), args[1])
        return either(rest, derivative(args[1], c)) if args[0].nullable else rest
    if kind == "or":
        return either(*(derivative(part, c) for part in args))
    if kind == "and":
        return both(*(derivative(part, c) for part in args))
    if kind == "not":
        return no(derivative(args[0], c))
    if kind == "repeat":
        inner, low, high = args
        return _cat(derivative(inner, c), repeat(inner, max(low - 1, 0), None if high is None else high - 1))
    if kind == "ends":
        return before_end(derivative(args[0], c))
    if kind == "mod":
        return _after_digit(args, c)
    return NONE


def _after_digit(args: tuple, c: int) -> Node:
    divisor, places, rest, fraction, started = args
    may_have_point = started and fraction < 0 and places > 0
    if c == ord(".") and may_have_point:
        return remainder(divisor, places, rest, fraction=0, started=True)
    if not ord("0") <= c <= ord("9") or fraction >= places:
        return NONE
    rest = (rest * 10 + c - ord("0")) % divisor
    return remainder(divisor, places, rest, fraction + 1 if fraction >= 0 else -1, started=True)


def _cuts(node: Node) -> frozenset[int]:
    """Where the derivative may change between one character and the next."""
    if node._cuts is None:
        kind, args = node.kind, node.args
        if kind == "chars":
            found = frozenset(low for low, _ in args) | frozenset(high + 1 for _, high in args)
        elif kind == "mod":
            found = frozenset((*range(ord("0"), ord("9") + 2), ord("."), ord(".") + 1))
        elif kind == "cat":
            found = _cuts(args[0]) | _cuts(args[1]) if args[0].nullable else _cuts(args[0])
        else:
            found = frozenset().union(*(_cuts(inner) for inner in args if isinstance(inner, Node)))
        node._cuts = found
    return node._cuts


Move = tuple[int, int, int]  # the first and the last of some characters, and the state they lead to


class Automaton:
    """Deterministic and trimmed: state 0 begins, every state can still reach an end. No states: the empty language."""

    def __init__(self, moves: list[list[Move]], accepting: list[bool]) -> None:
        self.moves = moves  # by state
        self.accepting = accepting


def automaton(node: Node) -> Automaton:
    number = {node: 0}
    queue = [node]
    moves: list[list[Move]] = []
    for state in queue:  # grows as it is read
        cuts = sorted(_cuts(state) | {0, 0xD800, 0xE000, BEGIN})
        row: list[Move] = []
        for low, high in zip(cuts, cuts[1:]):
            if low > LAST or 0xD800 <= low <= 0xDFFF:
                continue
            after = derivative(state, low)
            if after is NONE:
                continue
            if after not in number:
                if len(number) >= MAX_STATES:
                    raise RequestError(
                        "a pattern or length of the schema is too complex: simplify it or lower its counts."
                    )
                number[after] = len(queue)
                queue.append(after)
            row.append((low, high - 1, number[after]))
        moves.append(row)
    return _minimal(moves, [state.nullable for state in queue])


def is_empty(node: Node) -> bool:
    return node is NONE or not automaton(node).moves


def finite(node: Node) -> list[str] | None:
    """The words of a union of plain texts; None for any other expression."""
    words = []
    for part in node.args if node.kind == "or" else (node,):
        word = ""
        while part.kind == "cat" and part.args[0].kind == "chars":
            character = _only_character(part.args[0])
            if character is None:
                return None
            word += character
            part = part.args[1]
        character = "" if part is EMPTY else _only_character(part)
        if character is None:
            return None
        words.append(word + character)
    return words


def _only_character(node: Node) -> str | None:
    if node.kind != "chars" or len(node.args) != 1:
        return None
    low, high = node.args[0]
    return chr(low) if low == high else None


def _minimal(moves: list[list[Move]], accepting: list[bool]) -> Automaton:
    """Without states that cannot reach an end, and with equivalent states merged into one block."""
    alive = _can_end(moves, accepting)
    if 0 not in alive:
        return Automaton([], [])
    living: list[list[Move]] = []
    for row in moves:
        living.append([move for move in row if move[2] in alive])
    block = [int(ends) for ends in accepting]  # by state
    while True:  # a block is split if characters lead from its states to different blocks, until none is
        blocks: dict[tuple, int] = {}
        refined = [
            blocks.setdefault((block[state], _joined(row, block)), len(blocks)) for state, row in enumerate(living)
        ]
        if len(set(refined)) == len(set(block)):
            break
        block = refined
    first: dict[int, int] = {}  # the first state of each block
    for state in sorted(alive):
        first.setdefault(block[state], state)
    number = {each: idx for idx, each in enumerate(first)}
    renamed = [number.get(each, -1) for each in block]
    rows = [list(_joined(living[state], renamed)) for state in first.values()]
    return Automaton(rows, [accepting[state] for state in first.values()])


def _can_end(moves: list[list[Move]], accepting: list[bool]) -> set[int]:
    """The states from which an accepting state can be reached."""
    sources: dict[int, set[int]] = {}
    for state, row in enumerate(moves):
        for _, _, target in row:
            sources.setdefault(target, set()).add(state)
    alive = {state for state, ends in enumerate(accepting) if ends}
    queue = list(alive)
    while queue:
        fresh = sources.get(queue.pop(), set()) - alive
        alive |= fresh
        queue += fresh
    return alive


def _joined(row: list[Move], renamed: list[int]) -> tuple[Move, ...]:
    """The moves with their targets renamed, neighbouring ranges with the same target as one."""
    result: list[Move] = []
    for low, high, state in row:
        target = renamed[state]
        first, last, previous = result[-1] if result else (0, -2, -1)
        if last == low - 1 and previous == target:
            result[-1] = (first, high, target)
        else:
            result.append((low, high, target))
    return tuple(result)
