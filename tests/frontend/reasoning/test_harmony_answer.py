"""An answer's format in harmony: the grammar admits what the parser reads, header included."""

import json

import pytest

from quire.frontend.reasoning import harmony
from quire.messages import Vocabulary
from quire.structured.engines.xgrammar import XGrammar
from quire.structured.spec import GrammarSpec

MARKS = [b"<|start|>", b"<|channel|>", b"<|message|>", b"<|end|>", b"<|return|>"]
VOCABULARY = Vocabulary(
    [*MARKS, b"assistant", b"final", b"analysis", *(bytes([i]) for i in range(128))], list(range(5)), [4], 160
)


def ids(text: str) -> list[int]:
    found = []
    while text:
        token = max((t for t in VOCABULARY.tokens if text.encode().startswith(t)), key=len)
        found.append(VOCABULARY.tokens.index(token))
        text = text[len(token) :]
    return found


@pytest.fixture(scope="module")
def grammar():
    tag = {
        "type": "structural_tag",
        "format": harmony.answer({"type": "json_schema", "json_schema": {"type": "integer"}}),
    }
    return XGrammar(VOCABULARY).compile(GrammarSpec("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("text", ["<|channel|>final<|message|>42", "<|start|>assistant<|channel|>final<|message|>42"])
def test_a_header_comes_before_the_answer_and_is_no_part_of_it(grammar, text):
    matcher = grammar.replayed(ids(text))
    assert matcher is not None and matcher.is_complete
    parser = harmony.Parser(False)
    deltas = parser.feed(text), parser.finish()
    assert "".join(delta.content for delta in deltas) == "42"


@pytest.mark.parametrize("text", ["42", "<|channel|>analysis", "<|channel|>final<|message|>no"])
def test_nothing_else_is_admitted(grammar, text):
    assert grammar.replayed(ids(text)) is None
