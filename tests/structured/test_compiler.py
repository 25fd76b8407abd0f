"""Tickets: nothing waits, the same spec compiles once, monsters end themselves alone."""

import json
import time

import pytest

from quire.errors import ConfigError
from quire.messages import Vocabulary
from quire.structured import compiler as module
from quire.structured.compiler import Compiler
from quire.structured.spec import GrammarSpec

VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256], 320)
MONSTER = GrammarSpec("regex", ".*" * 400 + "x")


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler("auto", VOCABULARY, timeout_s=2.0)
    yield compiler
    compiler.close()


def settled(compiler, kind: str, text: str):
    ticket = compiler.submit(GrammarSpec(kind, text))
    assert ticket.wait(60)
    return ticket


def test_submitting_never_waits_and_the_same_spec_compiles_once(compiler):
    started = time.perf_counter()
    tickets = [compiler.submit(GrammarSpec("regex", "[a-c]+")) for _ in range(10)]
    assert time.perf_counter() - started < 0.5
    assert len({id(ticket) for ticket in tickets}) == 1
    assert tickets[0].wait(60) and tickets[0].grammar.matcher().accept(ord("a")) and tickets[0].error is None
    assert compiler.submit(GrammarSpec("regex", "[a-c]+")).done


def test_a_refusal_comes_with_the_ticket(compiler):
    ticket = settled(compiler, "json", '{"$ref": "http://example.com"}')
    assert ticket.grammar is None and "$ref" in str(ticket.error)


def test_a_monster_ends_alone_and_the_next_one_is_served(compiler):
    settled(compiler, "regex", "ready")
    monster, started = compiler.submit(MONSTER), time.perf_counter()
    other = compiler.submit(GrammarSpec("regex", "[x-z]+"))
    assert monster.wait(30) and "too complex" in str(monster.error)
    assert time.perf_counter() - started < 10
    assert other.wait(60) and other.grammar is not None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'root ::= root'),
        ("grammar", 'root ::= x\nx ::= x "a"'),
        ("regex", "[]"),
        ("json", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    ],
)
def test_an_empty_language_is_refused(compiler, kind, text):
    assert settled(compiler, kind, text).error is not None


def test_auto_takes_what_only_the_other_engine_can(compiler):
    assert settled(compiler, "grammar", 'start: "a" start | "b"').grammar.replayed(b"aab").is_complete
    assert settled(compiler, "regex", r"\p{Lu}+").grammar.replayed(b"AB").is_complete
    assert settled(compiler, "json", '{"type": "string", "maxLength": 4000}').grammar.replayed(b'"abc"').is_complete


def test_the_cache_is_bounded(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    for i in range(6):
        assert settled(compiler, "choice", json.dumps([f"word {i}"])).grammar
    assert len(compiler._tickets) <= 3
    assert compiler.submit(GrammarSpec("choice", '["word 5"]')).done


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="outlines"):
        Compiler("outlines", VOCABULARY)
