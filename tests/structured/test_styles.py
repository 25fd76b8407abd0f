"""Schemas of values that are not written as JSON: bare text between tags, and strings in quotes of another kind."""

import json

import pytest

from quire.errors import RequestError
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.spec import GrammarSpec
from tests.structured.replay import replayed


@pytest.fixture(scope="module")
def fits(vocabulary):
    engine = XGrammar(vocabulary)
    single = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if len(token) == 1}
    compiled = {}

    def check(form: dict, text: str) -> bool:
        tag = json.dumps({"type": "structural_tag", "format": form})
        if tag not in compiled:
            compiled[tag] = engine.compile_lowered(engine.lower(GrammarSpec("structural_tag", tag)))
        matcher = replayed(compiled[tag], [single[bytes([byte])] for byte in text.encode()])
        return matcher is not None and matcher.is_complete

    return check


def untyped(schema: dict) -> dict:
    no_string = r"[\s\S]*</v>[\s\S]*|-?[0-9]+|[\[{][\s\S]*"
    return {"type": "json_schema", "json_schema": schema, "style": "untyped", "no_string": no_string}


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        ({"type": "string", "pattern": "^a"}, ["a", 'a"\n<'], ["b", "a</v>", '"a"']),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["a", "", "3", "3x"], ["2", "-5"]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a[", '["a"]'], ["[1]"]),
        ({"enum": ["a", "1", 2, None]}, ["a", "2", "null"], ["1", "b", '"a"']),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, ['{"a":"x</v>"}'], ["a", "{a:1}"]),
        ({"allOf": [{"type": "string"}]}, ["x"], ["5", "[x"]),
    ],
)
def test_an_untyped_value_is_bare_text_or_json(fits, schema, good, bad):
    for text in good:
        assert fits(untyped(schema), text), text
    for text in bad:
        assert not fits(untyped(schema), text), text


def test_strings_in_other_quotes_are_not_escaped(fits):
    properties = {
        "a": {"type": "string"},
        "b": {"enum": ["x", "<y>", 1]},
        "c": {"type": "array", "items": {"type": "string", "maxLength": 2}},
        "d": {},
    }
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": schema, "style": "quoted", "quote": '<|"|>'}
    for text in (
        '{a:<|"|>say "hi" \\ <|\n<|"|>}',
        '{a:<|"|><|"|>,b:<|"|><y><|"|>,c:[<|"|>xy<|"|>],d:{e:[1,<|"|>z<|"|>,null]}}',
        '{a:<|"|><|"|>,b:1,d:<|"|>x<|"|>}',
    ):
        assert fits(form, text), text
    for text in (
        '{a:"x"}',
        '{"a":<|"|>x<|"|>}',
        '{a:<|"|>x<|"|>,b:<|"|>z<|"|>}',
        "{a:x}",
        '{a:<|"|><|"|>,c:[<|"|>xyz<|"|>]}',
    ):
        assert not fits(form, text), text


@pytest.mark.parametrize(
    "options",
    [
        {"style": "json", "quote": "x"},
        {"no_string": "x"},
        {"style": "quoted", "quote": ""},
        {"style": "untyped"},
        {"style": "untyped", "no_string": "("},
        {"style": "untyped", "no_string": r"[\s\S]*", "json_schema": {"type": "string"}},
        {"style": "quoted", "quote": "'", "json_schema": {"properties": {"a b": {}}, "required": ["a b"]}},
    ],
)
def test_what_makes_no_sense_is_refused(vocabulary, options):
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}, **options}}
    engine = XGrammar(vocabulary)
    with pytest.raises(RequestError):
        engine.compile_lowered(engine.lower(GrammarSpec("structural_tag", json.dumps(tag))))
