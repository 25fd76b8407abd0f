"""JSON schemas against the official test suite: `schemas.json` holds a part of it (MIT licence, see its own page)."""

import json
from pathlib import Path

import pytest
from benchmarks.json_schema_suite import Case, RandomSampler, judged

from quire.errors import RequestError
from quire.structured.engines.llguidance import LLGuidance
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.grammars.json_grammar import json_grammar
from quire.structured.spec import GrammarSpec
from tests.structured.replay import replayed

CASES = json.loads((Path(__file__).parent / "schemas.json").read_text())
ACCEPTED = [case for case in CASES if not case["refused"]]


def named(case) -> str:
    return f"{case['draft']}-{case['group']}-{case['name']}"[:80]


@pytest.fixture(scope="session")
def grammars(trial):
    """Accepted schemas, compiled."""
    result = {}
    for case in ACCEPTED:
        lowered = trial.run(GrammarSpec("json", json.dumps(case["schema"])))
        result[named(case)] = trial.engines[lowered.engine].compile_lowered(lowered.spec)
    return result


def accepts(grammar, vocabulary, value) -> bool:
    """Whether the grammar takes this value, written compactly, byte by byte."""
    single = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if len(token) == 1}
    data = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    matcher = replayed(grammar, [single[bytes([byte])] for byte in data])
    return matcher is not None and matcher.is_complete


@pytest.mark.parametrize("case", ACCEPTED, ids=named)
def test_what_the_suite_calls_invalid_cannot_be_generated(case, grammars, vocabulary):
    for value in case["invalid"]:
        assert not accepts(grammars[named(case)], vocabulary, value), value


def test_most_of_what_the_suite_calls_valid_can_be_generated(grammars, vocabulary):
    """Not all: properties keep the schema's order, objects that name theirs get no others, 1.0 is written 1."""
    results = [accepts(grammars[named(case)], vocabulary, value) for case in ACCEPTED for value in case["valid"]]
    assert sum(results) / len(results) > 0.8


def test_samples_validate(grammars, vocabulary):
    sampler = RandomSampler(vocabulary)
    outcomes = []
    for case in ACCEPTED:
        samples = [sampler.sample(grammars[named(case)]) for _ in range(3)]
        outcomes.append(judged(Case(case["group"], case["name"], case["schema"]), samples))
    assert [outcome.violations for outcome in outcomes if outcome.violations] == []
    assert sum(len(outcome.texts) for outcome in outcomes) > 2.5 * len(ACCEPTED)


def test_few_groups_of_the_suite_are_refused():
    groups = {case["group"] for case in CASES}
    honoured = {case["group"] for case in ACCEPTED}
    assert len(groups - honoured) < len(groups) / 8, groups - honoured


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"$ref": "https://example.com/schema.json"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$ref": "#"}, "$ref"),
        ({"multipleOf": 0.123456789}, "multipleOf"),
        ({"format": "iri"}, "format"),
        ({"pattern": "(?=a)b"}, "lookaround"),
        ({"pattern": r"(a)\1"}, r"\1"),
        ({"type": "text"}, "type"),
        ({"minimum": "3"}, "minimum"),
        ({"required": "name"}, "required"),
        ({"properties": []}, "properties"),
        ({"anyOf": []}, "anyOf"),
        ({"$schema": "https://example.com/my-dialect"}, "$schema"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(schema, keyword):
    with pytest.raises(RequestError) as refused:
        json_grammar(json.dumps(schema))
    assert keyword in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "enum": [1, 2]},
        {"minimum": 3, "maximum": 2, "type": "number"},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": False, "minItems": 1},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"not": {}},
    ],
    ids=json.dumps,
)
def test_a_schema_that_no_value_satisfies_is_refused(schema):
    with pytest.raises(RequestError, match="no JSON value satisfies"):
        json_grammar(json.dumps(schema))


def test_many_branches_told_apart_by_a_constant_are_no_trouble():
    branches = [{"type": "object", "properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]} for i in range(60)]
    assert json_grammar(json.dumps({"oneOf": branches})).count("\\u0022kind\\u0022") == 60


def test_properties_come_in_the_schemas_order_and_blanks_are_bounded(trial, vocabulary):
    schema = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "z"]}
    grammar = XGrammar(vocabulary).compile(GrammarSpec("json", json.dumps(schema)))
    single = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def fits(text: str) -> bool:
        matcher = replayed(grammar, [single[bytes([byte])] for byte in text.encode()])
        return matcher is not None and matcher.is_complete

    assert fits('{"z":null,"a":null}') and fits('{\n  "z": null,\n  "a": null\n}') and fits('{ "z": null, "a": null }')
    assert not fits('{"a":null,"z":null}')
    assert not fits('{  "z":null,"a":null}') and not fits('{"z":null,"a":null}\n')
    assert not fits("{\n" + " " * 17 + '"z":null,"a":null}')


def test_compact_json_has_no_blanks():
    assert '" "' not in json_grammar('{"type": "object"}', blanks="")


@pytest.mark.parametrize(("engine", "pattern"), [(XGrammar, " {1,2}|\\r\\n"), (LLGuidance, "( {1,2}|\\r\\n)?")])
def test_blanks_are_what_their_pattern_says(engine, pattern, vocabulary):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    grammar = engine(vocabulary).compile(GrammarSpec("json", schema), pattern)
    single = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def fits(text: str) -> bool:
        matcher = replayed(grammar, [single[bytes([byte])] for byte in text.encode()])
        return matcher is not None and matcher.is_complete

    assert fits('{ "a": []  }') and fits('{\r\n"a":  []\r\n}') and fits('{ "a": [ {}, "x" ] }')
    assert not fits('{   "a": [] }') and not fits('{\n"a": [] }')
    assert fits('{"a":[]}') is (engine is LLGuidance)  # where blanks may always be left out
    with pytest.raises(RequestError, match="blanks only|match nothing, too"):
        engine(vocabulary).compile(GrammarSpec("json", schema), " +" if engine is LLGuidance else " |,")


@pytest.mark.parametrize("pattern", ["x", " |,", "[^a]*", "[a&&b]|(", "$^a"])
def test_a_pattern_of_blanks_matches_nothing_else(pattern):
    with pytest.raises(RequestError):
        json_grammar("{}", blanks=pattern)
