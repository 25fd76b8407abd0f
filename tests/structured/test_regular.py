"""Patterns against Python's `re`, numbers against `decimal`."""

import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.structured.grammars import formats, numbers
from quire.structured.grammars.pattern import found_in, whole
from quire.structured.grammars.regular import Node, automaton, both, derivative, either, is_empty, no

PATTERNS = [
    "^a*$",
    "a+b",
    "^(ab|a)c?",
    "b$",
    "(^a|b)$",
    "[^ab]",
    "^.{2,3}$",
    "a{2}",
    "(a|b){1,3}c",
    "^a|b$",
    "",
    "^$",
    r"\d\w*",
    "a??b",
]
texts = st.text(alphabet="abc1\n", max_size=6)
decimals = st.decimals(min_value=-1000, max_value=1000, places=2, allow_nan=False)


def holds(node: Node, text: str) -> bool:
    for character in text:
        node = derivative(node, ord(character))
    return node.nullable


def runs(node: Node, text: str) -> bool:
    """The same, by the automaton."""
    machine, state = automaton(node), 0
    if not machine.moves:
        return False
    for character in text:
        state = next((target for low, high, target in machine.moves[state] if low <= ord(character) <= high), None)
        if state is None:
            return False
    return machine.accepting[state]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATTERNS), texts)
def test_a_pattern_is_found_where_re_finds_it(pattern, text):
    python = pattern.replace("$", r"\Z")  # Python's $ also matches before a last line break
    assert holds(found_in(pattern), text) == runs(found_in(pattern), text) == bool(re.search(python, text))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATTERNS), texts)
def test_a_whole_match_is_a_whole_match(pattern, text):
    assert holds(whole(pattern), text) == bool(re.fullmatch(pattern.replace("$", r"\Z"), text))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS), texts)
def test_languages_combine_as_sets_do(a, b, text):
    a, b = found_in(a), found_in(b)
    assert runs(both(a, b), text) == (holds(a, text) and holds(b, text))
    assert runs(either(a, b), text) == (holds(a, text) or holds(b, text))
    assert runs(both(a, no(b)), text) == (holds(a, text) and not holds(b, text))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_is_both_in_a_language_and_outside(pattern):
    assert is_empty(both(found_in(pattern), no(found_in(pattern))))


@settings(max_examples=300, deadline=None)
@given(decimals, decimals, st.booleans())
def test_bounds_compare_as_numbers(bound, value, strict):
    spelled = numbers.spelled(value)
    assert holds(numbers.at_least(bound, strict), spelled) == (value > bound if strict else value >= bound)
    assert holds(numbers.at_most(bound, strict), spelled) == (value < bound if strict else value <= bound)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["1", "3", "7", "0.5", "0.01", "0.07", "2.5", "100"]), decimals)
def test_multiples_divide_exactly(divisor, value):
    divides = value % Decimal(divisor) == 0
    spelled = numbers.spelled(value)
    assert holds(numbers.multiple_of(Decimal(divisor)), spelled) == divides
    assert holds(numbers.no_multiple_of(Decimal(divisor)), spelled) == (not divides)


@pytest.mark.parametrize("name", sorted(formats.HONOURED))
def test_formats_have_words(name):
    assert not is_empty(formats.language(name))


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[a", "a**", "*a", "a{3,2}", "(?=a)", "(^a)*", "(a{200}){200}", "[b-a]"]
    + [r"\b", r"\1", r"\ud800", r"\u{41", "\\"],
)
def test_patterns_that_are_not_understood_are_refused(pattern):
    with pytest.raises(RequestError):
        whole(pattern)
