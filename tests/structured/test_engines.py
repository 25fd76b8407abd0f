"""Both engines: masks against enumerated languages, exact rollback, forced tokens, batches."""

import json
import re
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.llguidance import LLGuidance
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.spec import GrammarSpec
from tests.structured.replay import replayed

TOKENS = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"aa", b'"', b'"a', b'b"', b"<s>", b"</s>"]
TINY = Vocabulary([*TOKENS, *(bytes([i]) for i in range(256) if bytes([i]) not in TOKENS)], [10, 11], [11], 300)
STOP = 11
ENGINES = [XGrammar, LLGuidance]
SPECS = {
    "regex": GrammarSpec("regex", "(ab|a)(bc)?c{0,2}"),
    "choice": GrammarSpec("choice", '["a", "abc", "bc", "cab", "aab"]'),
    "json": GrammarSpec("json", '{"enum": ["a", "ab", "abc", "ca"]}'),
    "gbnf": GrammarSpec("grammar", 'root ::= "a" x | "b"\nx ::= "b" | "bc" "c"?'),
}
LANGUAGES = {
    "regex": {
        w for n in range(7) for w in map("".join, product("abc", repeat=n)) if re.fullmatch("(ab|a)(bc)?c{0,2}", w)
    },
    "choice": {"a", "abc", "bc", "cab", "aab"},
    "json": {'"a"', '"ab"', '"abc"', '"ca"'},
    "gbnf": {"b", "ab", "abc", "abcc"},
}


def allowed(matcher) -> set[int]:
    mask = numpy.full(TINY.num_words, -1, dtype=numpy.int32)
    matcher.fill(mask)
    return set(numpy.flatnonzero(numpy.unpackbits(mask.view(numpy.uint8), bitorder="little")).tolist())


def truth(language: set[str], prefix: bytes) -> set[int]:
    words = {word.encode() for word in language}
    fits = {STOP} if prefix in words else set()
    for token_id, token in enumerate(TINY.tokens):
        begins_word = any(word.startswith(prefix + token) for word in words)
        if begins_word and token_id not in TINY.special_ids:
            fits.add(token_id)
    return fits


def next_bytes(language: set[str], prefix: bytes) -> set[bytes]:
    """The bytes that may come next, b"" for the end."""
    return {word.encode()[len(prefix) :][:1] for word in language if word.encode().startswith(prefix)}


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: engine.name)
def engine(request):
    return request.param(TINY)


@pytest.mark.parametrize("name", SPECS)
def test_masks_are_what_enumerating_the_language_says(engine, name):
    grammar = engine.compile(SPECS[name])
    todo = [(b"", [])]
    while todo:
        prefix, tokens = todo.pop()
        matcher = replayed(grammar, tokens)
        expected = truth(LANGUAGES[name], prefix)
        if engine.name == "llguidance" and len(next_bytes(LANGUAGES[name], prefix)) == 1:
            assert allowed(matcher) <= expected and allowed(matcher)  # it picks one tokenization of a forced text
        else:
            assert allowed(matcher) == expected, prefix
        assert matcher.is_complete == (STOP in expected)
        todo += [(prefix + TINY.tokens[t], [*tokens, t]) for t in expected - {STOP}]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rolling_back_is_exact(engine, data):
    grammar = engine.compile(SPECS[data.draw(st.sampled_from(sorted(SPECS)))])
    matcher, masks = grammar.matcher(), []
    while not matcher.terminated:
        masks.append(allowed(matcher))
        assert matcher.accept(data.draw(st.sampled_from(sorted(masks[-1]))))
    while masks:
        count = data.draw(st.integers(1, len(masks)))
        matcher.rollback(count)
        masks, expected = masks[: len(masks) - count], masks[len(masks) - count]
        assert allowed(matcher) == expected and not matcher.terminated


def test_a_token_that_does_not_fit_changes_nothing(engine):
    matcher = replayed(engine.compile(SPECS["choice"]), [2])
    before = allowed(matcher)
    assert not matcher.accept(1) and not matcher.accept(STOP) and not matcher.accept(10)
    assert allowed(matcher) == before and matcher.accept(0)


def test_forced_tokens_are_those_with_no_alternative(engine):
    grammar = engine.compile(GrammarSpec("grammar", 'root ::= "xyz" ("a" | "b") "w"'))
    ids = {token: token_id for token_id, token in enumerate(TINY.tokens)}
    matcher = grammar.matcher()
    before = allowed(matcher)
    assert matcher.forced() == [ids[b"x"], ids[b"y"], ids[b"z"]]
    assert allowed(matcher) == before
    assert replayed(grammar, matcher.forced()).forced() == []
    assert replayed(grammar, [*matcher.forced(), ids[b"a"]]).forced() == [ids[b"w"], STOP]


def test_after_the_stop_token_only_stop_tokens_follow(engine):
    matcher = replayed(engine.compile(SPECS["choice"]), [0, STOP])
    assert matcher.terminated and allowed(matcher) == {STOP} and not matcher.accept(STOP) and matcher.forced() == []


def test_tokens_that_do_not_fit_cannot_be_replayed(engine):
    assert replayed(engine.compile(SPECS["choice"]), [1, 1]) is None


def test_a_batch_of_masks_equals_one_by_one(engine):
    grammars = [engine.compile(spec) for spec in SPECS.values()]
    matchers = [grammar.matcher() for grammar in grammars]
    masks, rows = numpy.zeros((8, TINY.num_words), dtype=numpy.int32), [7, 5, 3, 1, 0][: len(matchers)]
    type(matchers[0]).fill_all(matchers, masks, rows)
    for matcher, row in zip(matchers, rows):
        single = numpy.zeros(TINY.num_words, dtype=numpy.int32)
        matcher.fill(single)
        assert (masks[row] == single).all()
    assert not masks[[2, 4, 6]].any()


def test_a_batch_of_tokens_is_accepted_or_refused_one_by_one(engine):
    grammars = [engine.compile(spec) for spec in SPECS.values()]
    matchers = [grammar.matcher() for grammar in grammars for _ in range(TINY.size)]
    token_ids = list(range(TINY.size)) * len(grammars)
    alone = [grammar.matcher().accept(token_id) for grammar in grammars for token_id in range(TINY.size)]
    refused = type(matchers[0]).accept_all(matchers, token_ids)
    assert refused == [idx for idx, accepted in enumerate(alone) if not accepted] and 0 < len(refused) < len(matchers)
    good = [idx for idx, accepted in enumerate(alone) if accepted]
    fresh = [grammars[idx // TINY.size].matcher() for idx in good]
    assert type(fresh[0]).accept_all(fresh, [token_ids[idx] for idx in good]) == []


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(a"),
        GrammarSpec("grammar", "root ::= nowhere"),
        GrammarSpec("grammar", "start: nowhere"),
        GrammarSpec("json", '{"type": "word"}'),
        GrammarSpec("structural_tag", '{"type": "structural_tag", "format": {"type": "nothing"}}'),
    ],
    ids=lambda spec: spec.text[:20],
)
def test_what_cannot_be_compiled_says_so_in_one_sentence(engine, spec):
    with pytest.raises(RequestError) as refused:
        engine.compile(spec)
    message = str(refused.value)
    assert "\n" not in message and "0x" not in message and "/" not in message.replace("</", "") and len(message) < 400


def test_the_schema_inside_a_structural_tag_is_honoured():
    schema = {"type": "object", "properties": {"a": {"enum": ["abc", "c"], "maxLength": 2}}, "required": ["a"]}
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    for written in (
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}},
        {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]},
    ):
        grammar = XGrammar(TINY).compile(GrammarSpec("structural_tag", json.dumps(written)))
        single = {token: token_id for token_id, token in enumerate(TINY.tokens) if len(token) == 1}
        assert replayed(grammar, [single[bytes([b])] for b in b'so <f>{"a":"c"}</f> it is']).is_complete
        assert replayed(grammar, [single[bytes([b])] for b in b'so <f>{"a":"abc"}</f>']) is None


def test_a_special_token_can_be_written_only_where_a_structural_tag_spells_it():
    engine = XGrammar(TINY)
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<s>", "content": {"type": "regex", "pattern": "a"}, "end": "b"},
    }
    matcher = engine.compile(GrammarSpec("structural_tag", json.dumps(tag))).matcher()
    assert 10 in allowed(matcher) and matcher.accept(10) and allowed(matcher) == {0, 3}
    assert 10 not in allowed(engine.compile(GrammarSpec("regex", "<s>a")).matcher())
