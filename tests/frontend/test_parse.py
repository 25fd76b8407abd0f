import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import registry
from quire.frontend.detokenize import Detokenizer
from quire.frontend.parse import Delta, OutputParser, Trimmed
from quire.frontend.reasoning import think
from quire.frontend.stop import StopStrings
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tools import hermes
from tests.frontend.tools.transcripts import CASES, SOURCES, TOOLS, cut, parsed

QWEN3 = next(source for source in SOURCES if source.template == "Qwen-Qwen3-0.6B")
TRANSCRIPT = f"<think>\nWhat is <b>?\n\nFine.\n</think>\n\nLet<|im_end|> me look.\n{QWEN3.transcript(CASES['two'])}"
EXPECTED = ("Let me look.", "What is <b>?\n\nFine.", [("get_weather", '{"city": "Rome"}'), ("now", "{}")])


def output_parser() -> OutputParser:
    return OutputParser(think.Parser(False), hermes.Parser(TOOLS), StopStrings(["<|im_end|>", "<|im_start|>"]))


def test_reasoning_content_and_calls_come_apart() -> None:
    assert parsed(output_parser(), TRANSCRIPT) == EXPECTED
    assert parsed(output_parser(), list(TRANSCRIPT)) == EXPECTED


@given(positions=st.lists(st.integers(0, 1000), max_size=30))
def test_any_cut_gives_the_same(positions: list[int]) -> None:
    assert parsed(output_parser(), cut(TRANSCRIPT, positions)) == EXPECTED


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.format}-{source.template}")
def test_tokens_of_a_real_tokenizer_give_the_same(source, smollm2: Tokenizer) -> None:
    module = registry.load("quire.frontend.tools", source.format)
    for case in source.cases:
        text = source.transcript(CASES[case])
        detokenizer = Detokenizer(smollm2, skip_special_tokens=False)
        pieces = [detokenizer.feed_one(token_id) for token_id in smollm2.encode(text, add_special_tokens=False)]
        pieces.append(detokenizer.flush())
        assert "".join(pieces) == text and len(pieces) > 3
        assert parsed(module.Parser(TOOLS), pieces) == parsed(module.Parser(TOOLS), text)


def test_without_stages_text_passes_at_once() -> None:
    parser = OutputParser(None, None)
    assert parser.feed("<think> <tool_call> ") == Delta(content="<think> <tool_call> ")
    assert parser.finish() == Delta()


def test_content_waits_only_for_what_may_be_a_mark() -> None:
    parser = OutputParser(None, hermes.Parser(TOOLS))
    assert parser.feed("a < b").content == "a < b"
    assert parser.feed(" and <tool").content == " and"
    assert parser.feed("box>").content == " <toolbox>"


def test_special_tokens_stay_out_of_content_and_reasoning() -> None:
    specials = StopStrings(["<|a|>", "<|end|>"])
    text = "<think>x<|end|>y</think>a<|a|>b<|a<|end|>"
    for pieces in (text, list(text)):
        assert parsed(OutputParser(think.Parser(False), None, specials), pieces) == ("ab<|a", "xy", [])


@given(text=st.text(" \nab"), positions=st.lists(st.integers(0, 50), max_size=5))
@settings(max_examples=60)
def test_trimmed_text_is_what_strip_gives(text: str, positions: list[int]) -> None:
    pieces: list[str] = []
    trimmed = Trimmed(pieces.append)
    for piece in cut(text, positions):
        trimmed(piece)
    assert "".join(pieces) == text.strip()
