"""An answer's format in harmony: the grammar admits what the parser reads, header included."""

import json

import pytest

from quire.frontend.reasoning import harmony
from quire.messages import Vocabulary
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.spec import GrammarSpec

MARKS = [b"<|start|>", b"<|channel|>", b"<|message|>", b"<|end|>", b"<|return|>"]
TOKENS = [*MARKS, b"assistant", b"final", b"analysis", *(bytes([code]) for code in range(128))]
VOCABULARY = Vocabulary(TOKENS, special_ids=list(range(5)), stop_ids=[4], size=160)


def ids(text: str) -> list[int]:
    found = []
    while text:
        token = max((token for token in TOKENS if text.encode().startswith(token)), key=len)
        found.append(TOKENS.index(token))
        text = text[len(token) :]
    return found


@pytest.fixture(scope="module")
def grammar():
    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {"type": "structural_tag", "format": harmony.answer(number)}
    return XGrammar(VOCABULARY).compile(GrammarSpec("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("text", ["<|channel|>final<|message|>42", "<|start|>assistant<|channel|>final<|message|>42"])
def test_a_header_comes_before_the_answer_and_is_no_part_of_it(grammar, text):
    matcher = grammar.matcher()
    assert all(matcher.accept(token_id) for token_id in ids(text)) and matcher.is_complete
    parser = harmony.Parser(False)
    deltas = parser.feed(text), parser.finish()
    assert "".join(delta.content for delta in deltas) == "42"


@pytest.mark.parametrize("text", ["42", "<|channel|>analysis", "<|channel|>final<|message|>no"])
def test_nothing_else_is_admitted(grammar, text):
    matcher = grammar.matcher()
    assert not all(matcher.accept(token_id) for token_id in ids(text))
