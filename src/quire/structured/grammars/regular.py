"""Regular languages of characters as expressions closed under union, intersection and complement.

What `pattern`, lengths, number ranges and property names of a JSON schema become: the schema compiler combines them, asks
whether anything is remaining and gets an automaton. Must not know JSON: characters here are those of the decoded text.
"""

from collections.abc import Iterable
from weakref import WeakValueDictionary

from quire.errors import RequestError

MAX_STATES = 3000  # of one automaton; beyond it a request is refused
LAST = 0x10FFFF
BEGIN, END = LAST + 1, LAST + 2  # the characters that ^ and $ match: before the first and after the last of the text
Ranges = tuple[tuple[int, int], ...]  # inclusive, sorted, disjoint


class Node:
    """One language. Equal expressions are the same object, so that automata close quickly."""

    __slots__ = ("kind", "args", "nullable", "_cuts", "__weakref__")
    _all: "WeakValueDictionary[tuple, Node]" = WeakValueDictionary()

    kind: str
    args: tuple
    nullable: bool  # holds the empty text


def _node(kind: str, args: tuple, nullable: bool) -> Node:
    key = (kind, args)
    node = Node._all.get(key)
    if node is None:
        node = Node()
        node.kind, node.args, node.nullable, node._cuts = kind, args, nullable, None
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
        remaining = [
            part for a, b in remaining for part in ((a, min(b, low - 1)), (max(a, high + 1), b)) if part[0] <= part[1]
        ]
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
    while a.kind == "cat":  # kept leaning to the right: a derivative then only touches the head
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
    return _node("or", tuple(sorted(parts, key=id)), any(p.nullable for p in parts))


def both(*nodes: Node) -> Node:
    parts: dict[Node, None] = {}
    for node in nodes:
        parts.update(dict.fromkeys(node.args if node.kind == "and" else (node,)))
    parts.pop(ANYTHING, None)
    if NONE in parts:
        return NONE
    if len(parts) <= 1:
        return next(iter(parts), ANYTHING)
    return _node("and", tuple(sorted(parts, key=id)), all(p.nullable for p in parts))


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
    if (low, high) == (1, 1) or (node.kind == "repeat" and node.args[1:] == (0, None) and low < 2):
        return node
    return _node("repeat", (node, 0 if node.nullable else low, high), node.nullable or low == 0)


def remainder(divisor: int, places: int, rest: int = 0, fraction: int = -1, started: bool = False) -> Node:
    """Unsigned decimals with up to `places` digits after the point that are multiples of divisor / 10**places."""
    remaining = places - max(fraction, 0)
    return _node(
        "mod",
        (divisor, places, rest, fraction, started),
        started and fraction != 0 and rest * 10**remaining % divisor == 0,
    )


def before_end(node: Node) -> Node:
    """Texts which `node` matches when END follows them."""
    return NONE if node is NONE else _node("ends", (node,), derivative(node, END).nullable)


def text(string: str) -> Node:
    return cat(*(chars([(ord(c), ord(c))]) for c in string))


ANYTHING = _node("repeat", (CHAR, 0, None), True)


def derivative(node: Node, c: int) -> Node:
    """What may follow `c`."""
    kind, args = node.kind, node.args
    if kind == "chars":
        return EMPTY if any(low <= c <= high for low, high in args) else NONE
    if kind == "cat":
        rest = _cat(derivative(args[0], c), args[1])
        return either(rest, derivative(args[1], c)) if args[0].nullable else rest
    if kind == "or":
        return either(*(derivative(a, c) for a in args))
    if kind == "and":
        return both(*(derivative(a, c) for a in args))
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
    if c == ord(".") and started and fraction < 0 and places > 0:
        return remainder(divisor, places, rest, 0, True)
    if not ord("0") <= c <= ord("9") or fraction >= places:
        return NONE
    return remainder(divisor, places, (rest * 10 + c - ord("0")) % divisor, fraction + 1 if fraction >= 0 else -1, True)


def _cuts(node: Node) -> frozenset[int]:
    """Where the derivative may change between one character and the next."""
    if node._cuts is None:
        kind, args = node.kind, node.args
        if kind == "chars":
            found = frozenset(cut for low, high in args for cut in (low, high + 1))
        elif kind == "mod":
            found = frozenset((*range(ord("0"), ord("9") + 2), ord("."), ord(".") + 1))
        elif kind == "cat":
            found = _cuts(args[0]) | _cuts(args[1]) if args[0].nullable else _cuts(args[0])
        else:
            found = frozenset().union(*(_cuts(a) for a in args if isinstance(a, Node)))
        node._cuts = found
    return node._cuts


class Automaton:
    """Deterministic and trimmed: state 0 begins, every state can still reach an end. No states: the empty language."""

    def __init__(self, moves: list[list[tuple[int, int, int]]], accepting: list[bool]) -> None:
        self.moves, self.accepting = moves, accepting  # moves[state]: (low, high, next state)


def automaton(node: Node) -> Automaton:
    number, queue, moves = {node: 0}, [node], []
    for state in queue:  # grows as it is read
        cuts = sorted(_cuts(state) | {0, 0xD800, 0xE000, BEGIN})
        row: list[tuple[int, int, int]] = []
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
            head = part.args[0].args
            if len(head) != 1 or head[0][0] != head[0][1]:
                return None
            word += chr(head[0][0])
            part = part.args[1]
        if part.kind == "chars" and len(part.args) == 1 and part.args[0][0] == part.args[0][1]:
            words.append(word + chr(part.args[0][0]))
        elif part is EMPTY:
            words.append(word)
        else:
            return None
    return words


def _minimal(moves: list[list[tuple[int, int, int]]], accepting: list[bool]) -> Automaton:
    alive = _can_end(moves, accepting)
    if 0 not in alive:
        return Automaton([], [])
    block = [int(a) for a in accepting]
    while True:  # states that differ in where their characters lead are told apart until none are
        signature: dict[tuple, int] = {}
        refined = [
            signature.setdefault(
                (block[s], _joined((low, high, block[t]) for low, high, t in row if t in alive)), len(signature)
            )
            for s, row in enumerate(moves)
        ]
        if len(set(refined)) == len(set(block)):
            break
        block = refined
    first: dict[int, int] = {}
    for state in sorted(alive):
        first.setdefault(block[state], state)
    number = {b: i for i, b in enumerate(first)}
    rows = [
        list(_joined((low, high, number[block[t]]) for low, high, t in moves[s] if t in alive)) for s in first.values()
    ]
    return Automaton(rows, [accepting[s] for s in first.values()])


def _can_end(moves: list[list[tuple[int, int, int]]], accepting: list[bool]) -> set[int]:
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


def _joined(row: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring ranges with the same target as one."""
    result: list[tuple[int, int, int]] = []
    for low, high, target in row:
        if result and result[-1][1] == low - 1 and result[-1][2] == target:
            result[-1] = (result[-1][0], high, target)
        else:
            result.append((low, high, target))
    return tuple(result)
