"""JSON numbers as regular languages of their spellings: bounds, multiples, single values.

Called by the schema compiler. Spellings here have no exponent, and never a minus before zero. Numbers with a point have
at most 15 significant digits, because programs read them as doubles: up to there, different numbers are different
doubles.
"""

from decimal import Decimal

from quire.errors import RequestError
from quire.structured.grammars.regular import EMPTY, NONE, Node, both, cat, chars, either, no, remainder, repeat, text
from quire.structured.spec import exponent

MAX_DIGITS = 20  # before the point: holds every 64-bit integer
MAX_DIVISOR = 2000  # states of the automaton that divides

_DIGIT, _NONZERO = chars([(48, 57)]), chars([(49, 57)])
_DIGITS = repeat(_DIGIT, 0, None)
_POINT, _MINUS = text("."), text("-")
_WHOLE = either(text("0"), cat(_NONZERO, _DIGITS))  # unsigned
_FRACTION = either(EMPTY, cat(_POINT, repeat(_DIGIT, 1, None)))
_SIGN = either(EMPTY, _MINUS)
_UNSIGNED = cat(_WHOLE, _FRACTION)

INTEGER = either(text("0"), cat(_SIGN, _NONZERO, repeat(_DIGIT, 0, MAX_DIGITS - 1)))
# A nonzero digit after the point: no integer is spelled like this.
BROKEN = cat(_SIGN, _WHOLE, _POINT, _DIGITS, _NONZERO, _DIGITS)
_SHORT = cat(_SIGN, _DIGIT, repeat(either(_DIGIT, _POINT), 0, 15))
_UNIQUE = either(INTEGER, both(_SHORT, cat(_SIGN, _WHOLE, _POINT, _DIGITS, _NONZERO)))  # one spelling per number
SPELLINGS = either(INTEGER, both(_SHORT, cat(_SIGN, _WHOLE, _POINT, repeat(_DIGIT, 1, None))))


def literal(value: int | Decimal) -> Node:
    return text(spelled(value))


def spelled(value: int | Decimal) -> str:
    value = Decimal(value)
    is_long = len(value.as_tuple().digits) > 40 or exponent(value) < -40
    if is_long or value.adjusted() > 40:
        raise RequestError("a number in the schema has more than 40 digits: shorten it.")
    plain = format(value, "f")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    return "0" if plain in ("-0", "") else plain


def other_than(values: Node) -> Node:
    """Every number but those spelled by `values`, which are literals."""
    return both(no(values), _UNIQUE)


def at_least(bound: int | Decimal, strict: bool = False) -> Node:
    bound = Decimal(bound)
    is_positive = bound > 0 or (bound == 0 and strict)  # every number that fits
    if is_positive:
        return _above(bound, strict)
    return either(_UNSIGNED, cat(_MINUS, both(_below(-bound, strict), _above(Decimal(0), True))))


def at_most(bound: int | Decimal, strict: bool = False) -> Node:
    bound = Decimal(bound)
    is_negative = bound < 0 or (bound == 0 and strict)  # every number that fits
    if is_negative:
        return cat(_MINUS, _above(-bound, strict))
    return either(cat(_MINUS, _above(Decimal(0), True)), _below(bound, strict))


def multiple_of(divisor: int | Decimal) -> Node:
    digits, places = _scaled(divisor)
    return cat(_SIGN, both(remainder(digits, places), _UNSIGNED))


def no_multiple_of(divisor: int | Decimal) -> Node:
    digits, places = _scaled(divisor)
    return both(no(cat(_SIGN, remainder(digits, places))), _UNIQUE)


def _scaled(divisor: int | Decimal) -> tuple[int, int]:
    """(7, 2) for 0.07."""
    divisor = Decimal(divisor)
    if divisor <= 0:
        raise RequestError("multipleOf must be greater than 0.")
    places = max(0, -exponent(divisor.normalize()))
    if places > 12 or divisor.scaleb(places) > MAX_DIVISOR:
        raise RequestError(
            f"multipleOf {divisor} is not supported: its digits without the point must not exceed {MAX_DIVISOR}."
        )
    return int(divisor.scaleb(places)), places


def _split(bound: Decimal) -> tuple[str, str]:
    whole, _, fraction = spelled(bound).partition(".")
    return whole, fraction


def _above(bound: Decimal, strict: bool) -> Node:
    """Unsigned spellings of numbers not below (strict: above) an unsigned bound."""
    whole, fraction = _split(bound)
    larger = [cat(_NONZERO, repeat(_DIGIT, len(whole), None))]  # more digits
    for idx, digit in enumerate(whole):
        num_after = len(whole) - idx - 1
        larger.append(cat(text(whole[:idx]), _from_to(int(digit) + 1, 9), repeat(_DIGIT, num_after, num_after)))
    return either(
        cat(both(either(*larger), _WHOLE), _FRACTION),
        cat(text(whole), _pointed(_digits_above(fraction, strict))),
    )


def _below(bound: Decimal, strict: bool) -> Node:
    """Unsigned spellings of numbers not above (strict: below) an unsigned bound."""
    whole, fraction = _split(bound)
    smaller = [repeat(_DIGIT, 1, len(whole) - 1)] if len(whole) > 1 else []  # fewer digits
    for idx, digit in enumerate(whole):
        num_after = len(whole) - idx - 1
        smaller.append(cat(text(whole[:idx]), _from_to(0, int(digit) - 1), repeat(_DIGIT, num_after, num_after)))
    return either(
        cat(both(either(*smaller), _WHOLE), _FRACTION),
        cat(text(whole), _pointed(_digits_below(fraction, strict))),
    )


def _pointed(digits: Node) -> Node:
    """Digits after a point; no digits, no point."""
    return either(EMPTY if digits.nullable else NONE, cat(_POINT, both(digits, repeat(_DIGIT, 1, None))))


def _digits_above(bound: str, strict: bool) -> Node:
    bound = bound.rstrip("0")
    if not bound:
        return cat(_DIGITS, _NONZERO, _DIGITS) if strict else _DIGITS
    first = bound[0]
    return either(cat(_from_to(int(first) + 1, 9), _DIGITS), cat(text(first), _digits_above(bound[1:], strict)))


def _digits_below(bound: str, strict: bool) -> Node:
    bound = bound.rstrip("0")
    if not bound:
        return NONE if strict else repeat(text("0"), 0, None)
    first = bound[0]
    return either(EMPTY, cat(_from_to(0, int(first) - 1), _DIGITS), cat(text(first), _digits_below(bound[1:], strict)))


def _from_to(low: int, high: int) -> Node:
    return chars([(48 + low, 48 + high)])
