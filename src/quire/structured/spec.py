"""What a request carries: the kind and the text of what its output must match, and the checks before it is compiled.

Made and checked by the frontend in its event loop, so `check` is linear and cheap; compiled by the core's
`compiler.py`. Must not import an engine. Only compiling tells whether a spec can be honoured: passing `check` does not.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any

import msgspec

from quire.errors import RequestError
from quire.params import MAX_GRAMMAR_CHARS, MAX_GRAMMAR_CHOICES

MAX_DEPTH = 64  # of JSON
MAX_GROUPS = 100  # of nested parentheses in a grammar or regular expression
MAX_DIGITS = 40  # of any number, before and after the point
MAX_COUNT = 10_000  # in a regular expression, and items, characters or properties a schema asks for
KINDS = ("json", "regex", "choice", "grammar", "gbnf", "structural_tag")

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d+)?\s*,?\s*(\d+)?\s*\}")
_AT_LEAST = {"minLength", "minItems", "minProperties", "minContains"}
_DATA = {"const", "enum", "default", "examples"}  # hold values, not schemas
# Defined by the standard and not honoured. Names the standard does not know are annotations, as it says itself.
REFUSED_FORMATS = {
    "idn-email",
    "idn-hostname",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "relative-json-pointer",
    "regex",
}


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    kind: str  # one of KINDS
    # json: the schema; choice: a JSON list of strings; grammar: EBNF as xgrammar reads it, or Lark; gbnf: a grammar as
    # llama.cpp reads it; structural_tag: xgrammar's JSON
    text: str
    blanks: str | None = None  # between the parts of JSON: a pattern of them; empty: none; None: as always


def check(spec: GrammarSpec) -> None:
    """Raises RequestError for what is plainly wrong or too large."""
    if spec.kind not in KINDS:
        raise RequestError(f"structured output of kind {spec.kind[:40]!r} is unknown: use one of {', '.join(KINDS)}.")
    if len(spec.text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"the {spec.kind} has {len(spec.text)} characters, the limit is {MAX_GRAMMAR_CHARS}: shorten it."
        )
    if not spec.text.strip():
        raise RequestError(f"the {spec.kind} must not be empty.")
    try:
        (spec.text + (spec.blanks or "")).encode()
    except UnicodeEncodeError:
        raise RequestError(f"the {spec.kind} holds a lone surrogate (half of a UTF-16 pair).") from None
    if spec.blanks:
        _check_pattern(GrammarSpec("whitespace_pattern", spec.blanks))
    check_text = {"json": _check_schema, "choice": _check_choices, "structural_tag": _check_tag}
    check_text.get(spec.kind, _check_pattern)(spec)


def is_lark(text: str) -> bool:
    """GBNF defines its rules with ::=, Lark with a colon."""
    return "::=" not in text


def _parsed(spec: GrammarSpec) -> Any:
    text = spec.text
    if text.count("{") + text.count("[") > MAX_DEPTH:  # fewer cannot nest deeper
        depth = 0
        for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
            depth += 1 if bracket in "[{" else -1
            if depth > MAX_DEPTH:
                raise RequestError(f"the {spec.kind} nests deeper than {MAX_DEPTH} levels: flatten it with $defs.")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_whole_number, parse_float=_fraction)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(f"the {spec.kind} holds a lone surrogate (half of a UTF-16 pair).") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "bad number"
        raise RequestError(f"the {spec.kind} is not valid JSON: {reason}.") from None
    _check_numbers(spec.kind, value)
    return value


def _check_numbers(kind: str, value: Any) -> None:
    stack = [("", value)]
    while stack:
        keyword, value = stack.pop()
        if isinstance(value, dict):
            stack += value.items()
        elif isinstance(value, list):
            stack += [(keyword, inner) for inner in value]
        elif value == math.inf:
            what = f"{keyword!r:.60}" if keyword else "a number"
            raise RequestError(f"{what} in the {kind} has more than {MAX_DIGITS} digits: shorten it.")


def _whole_number(digits: str) -> int | float:
    """Infinity stands for numbers that are too long: JSON has none of its own."""
    return int(digits) if len(digits.lstrip("-")) <= MAX_DIGITS else math.inf


def _fraction(digits: str) -> float:
    number = Decimal(digits)
    is_short = len(number.as_tuple().digits) <= MAX_DIGITS and exponent(number) >= -MAX_DIGITS
    return float(digits) if is_short and number.adjusted() < MAX_DIGITS else math.inf


def exponent(number: Decimal) -> int:
    """-2 for 0.07: the power of ten of its last digit."""
    power = number.as_tuple().exponent
    return power if isinstance(power, int) else 0  # a letter for infinity and NaN, which JSON does not have


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _check_schema(spec: GrammarSpec) -> None:
    schema = _parsed(spec)
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema must be an object or a boolean.")
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            for keyword in value.keys() & _AT_LEAST:
                if isinstance(value[keyword], (int, float)) and value[keyword] > MAX_COUNT:
                    raise RequestError(f"{keyword} is larger than {MAX_COUNT}: lower it.")
            name = value.get("format")
            if isinstance(name, str) and name in REFUSED_FORMATS:
                raise RequestError(f"format {name!r} is not supported: remove it, or use pattern.")
            stack += [inner for keyword, inner in value.items() if keyword not in _DATA]


def _check_choices(spec: GrammarSpec) -> None:
    choices = _parsed(spec)
    if not isinstance(choices, list):
        choices = []
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError("choice must be a list of non-empty strings.")
    if len(choices) > MAX_GRAMMAR_CHOICES:
        raise RequestError(f"choice has {len(choices)} entries, the limit is {MAX_GRAMMAR_CHOICES}.")


def _check_tag(spec: GrammarSpec) -> None:
    if not isinstance(_parsed(spec), dict):
        raise RequestError("structural_tag must be a JSON object.")


def _check_pattern(spec: GrammarSpec) -> None:
    for low, high in _COUNT.findall(spec.text):
        if any(len(digits) > 5 or int(digits or 0) > MAX_COUNT for digits in (low, high)):
            raise RequestError(f"the {spec.kind} repeats something more than {MAX_COUNT} times: lower the count.")
    depth = 0
    for bracket in re.findall(r"[()]", spec.text):
        depth = max(depth + (1 if bracket == "(" else -1), 0)
        if depth > MAX_GROUPS:
            raise RequestError(f"the {spec.kind} nests parentheses deeper than {MAX_GROUPS} levels.")
