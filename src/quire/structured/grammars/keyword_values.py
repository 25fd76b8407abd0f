"""Reads the values of a schema's keywords, checked: a schema comes from an untrusted client."""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from quire.errors import RequestError
from quire.structured.grammars import numbers
from quire.structured.grammars.regular import Node, either, text
from quire.structured.spec import MAX_COUNT

TYPES = {"null": {"null"}, "boolean": {"true", "false"}, "number": {"number"}, "integer": {"number"}}
TYPES |= {"string": {"string"}, "array": {"array"}, "object": {"object"}}


def type_names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise RequestError(f"type must be one of {', '.join(TYPES)}, not {str(name)[:40]!r}.")
    return names


def number(keyword: str, value: Any) -> int | Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise RequestError(f"{keyword} must be a number.")
    return value


def count(keyword: str, value: Any, capped: bool = False) -> int:
    """`capped`: a larger upper limit means no more than the largest we take."""
    amount = number(keyword, value)
    if amount > MAX_COUNT and not capped:
        raise RequestError(f"{keyword} is larger than {MAX_COUNT}: lower it.")
    amount = min(amount, MAX_COUNT)  # before it is made an integer: 1e999999999 has many digits
    if amount != int(amount) or amount < 0:
        raise RequestError(f"{keyword} must be a whole number from 0.")
    return int(amount)


def string(keyword: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{keyword} must be a string.")
    return value


def array(keyword: str, value: Any) -> list:
    if not isinstance(value, list):
        raise RequestError(f"{keyword} must be a list.")
    return value


def strings(keyword: str, value: Any) -> list[str]:
    if any(not isinstance(item, str) for item in array(keyword, value)):
        raise RequestError(f"{keyword} must be a list of strings.")
    return value


def schemas(keyword: str, value: Any, allow_empty: bool = False) -> list:
    if not array(keyword, value) and not allow_empty:
        raise RequestError(f"{keyword} must not be empty.")
    return value


def mapping(keyword: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{keyword} must be an object.")
    return value


def by_kind(values: Iterable[Any]) -> tuple[frozenset[str], Node | None, Node | None, list[Any]]:
    """The values of an enum by kind: constants, strings, numbers, and arrays or objects."""
    kinds: set[str] = set()
    texts: list[Node] = []
    spellings: list[Node] = []
    deep: list[Any] = []
    for value in values:
        if value is None or isinstance(value, bool):
            kinds.add({None: "null", True: "true", False: "false"}[value])
        elif isinstance(value, str):
            texts.append(text(value))
        elif isinstance(value, (int, Decimal)):
            spellings.append(numbers.literal(value))
        else:
            deep.append(value)
    strings = either(*texts) if texts else None
    numerals = either(*spellings) if spellings else None
    return frozenset(kinds), strings, numerals, deep


def exactly(value: Any) -> dict[str, Any]:
    """A schema that only this array or object satisfies."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"type": "array", "prefixItems": items, "minItems": len(value), "maxItems": len(value)}
    properties = {name: {"const": member} for name, member in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}
