"""What is refused before anybody works on it, and that finding out is cheap."""

import json
import time

import pytest

from quire.errors import RequestError
from quire.structured.spec import GrammarSpec, check


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("yaml", "a: b", "unknown"),
        ("json", "", "empty"),
        ("json", "{", "valid JSON"),
        ("json", '{"minimum": NaN}', "valid JSON"),
        ("json", "[]", "object or a boolean"),
        ("json", "[" * 10_000 + "]" * 10_000, "deeper"),
        ("json", '{"a":' * 10_000 + "1" + "}" * 10_000, "deeper"),
        ("json", '{"minItems": 1000000000}', "minItems"),
        ("json", '{"properties": {"a": {"minLength": 1e9}}}', "minLength"),
        ("json", '{"not": {"maxItems": 1' + "0" * 400 + "}}", "'maxItems' in the json has more than 40 digits"),
        ("json", '{"not": {"maxItems": 1e400}}', "maxItems.*digits"),
        ("json", '{"properties": {"a": {"enum": [1, 1e-400]}}}', "enum.*digits"),
        ("json", '{"const": 1' + "0" * 5000 + "}", "const.*digits"),
        ("structural_tag", '{"format": {"max": 1e999999999}}', "max.*digits"),
        ("json", '{"items": {"format": "uri-template"}}', "format"),
        ("json", '{"const": "\\ud800"}', "surrogate"),
        ("json", " " * 200_000, "characters"),
        ("regex", "a{100000}", "repeats"),
        ("regex", "(" * 200 + ")" * 200, "deeper"),
        ("grammar", "root ::= " + "(" * 5000, "deeper"),
        ("choice", "[]", "non-empty"),
        ("choice", '["a", 1]', "non-empty"),
        ("choice", '{"a": 1}', "list"),
        ("structural_tag", "[]", "object"),
        ("regex", "a\ud800", "surrogate"),
    ],
)
def test_hostile_and_broken_specs_are_refused(kind, text, reason):
    with pytest.raises(RequestError, match=reason):
        check(GrammarSpec(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", "true"),
        ("json", '{"const": {"minItems": 1000000000}}'),
        ("json", '{"maxItems": 1e6, "minimum": -1.5e-7, "maximum": 18446744073709551616, "default": -0.0}'),
        ("json", '{"properties": {"format": {"type": "string"}, "minItems": {"type": "integer"}}}'),
        ("json", json.dumps({"enum": ["[" * 500]})),
        ("regex", "[0-9]{3}-[0-9]{4}"),
        ("choice", '["yes", "no"]'),
        ("grammar", 'root ::= "a"'),
    ],
)
def test_ordinary_specs_pass(kind, text):
    check(GrammarSpec(kind, text))


def test_checking_is_cheap():
    schema = {
        "type": "object",
        "properties": {f"field {i}": {"type": "string", "description": "what it is"} for i in range(90)},
    }
    spec = GrammarSpec("json", json.dumps(schema))
    assert len(spec.text) > 5000
    started = time.process_time()
    for _ in range(20):
        check(spec)
    assert (time.process_time() - started) / 20 < 0.005  # really 0.3 ms
