"""What parsers find as blocks: their order, what is left out, and the same blocks however the text was cut."""

import pytest

from quire.api.server.anthropic.blocks import Blocks, Piece, put_together
from quire.api.server.anthropic.body import TextBlock, ThinkingBlock, ToolUseBlock
from quire.frontend.parse import CallDelta, Delta, OutputParser
from quire.frontend.reasoning import think
from quire.frontend.tools import hermes

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
ANSWER = f"<think>\nI have to add.\n</think>\n\nI add twice.\n{CALL}\n{CALL}"


def blocks_of(*deltas: Delta, thinking="shown") -> list:
    blocks = Blocks(thinking)
    return shown(put_together([*(piece for delta in deltas for piece in blocks.take(delta)), *blocks.end()]))


def shown(blocks: list) -> list:
    """Without ids and signatures."""
    found = []
    for block in blocks:
        match block:
            case ToolUseBlock(name=name, input=arguments):
                found.append((name, arguments))
            case ThinkingBlock(thinking=text):
                found.append(("thinking", text))
            case TextBlock(text=text):
                found.append(text)
    return found


def parsed(pieces: list[str]) -> list:
    parser = OutputParser(think.Parser(False), hermes.Parser(TOOLS))
    return blocks_of(*map(parser.feed, pieces), parser.finish())


def test_an_answer_is_thinking_text_and_calls_in_their_order():
    wanted = [("thinking", "I have to add."), "I add twice.", ("add", {"a": [1, 2]}), ("add", {"a": [1, 2]})]
    assert parsed([ANSWER]) == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_the_blocks_do_not_depend_on_how_the_text_arrived(size):
    assert parsed([ANSWER[idx : idx + size] for idx in range(0, len(ANSWER), size)]) == parsed([ANSWER])


def test_white_space_before_a_call_is_no_block_of_its_own():
    assert parsed([f"<think>\nHm.\n</think>\n\n{CALL}"]) == [("thinking", "Hm."), ("add", {"a": [1, 2]})]


def test_white_space_before_a_text_belongs_to_it():
    assert blocks_of(Delta(content=" "), Delta(content="\n"), Delta(content=" x")) == [" \n x"]


def test_every_answer_has_a_block():
    assert blocks_of() == [""] and blocks_of(Delta(content=" ")) == [" "]


def test_a_call_that_was_cut_off_is_left_out_of_a_whole_answer():
    assert parsed(["Let me add.", CALL[: CALL.index("2")]]) == ["Let me add."]
    assert parsed([CALL[: CALL.index("arguments")]]) != [("add", {})]


def test_the_rest_of_a_call_comes_before_what_is_said_after_it():
    first = Delta(calls=[CallDelta(0, "add", '{"a":')])
    rest = Delta(content="Done.", calls=[CallDelta(0, None, "1}")])
    assert blocks_of(first, rest) == [("add", {"a": 1}), "Done."]


def test_thinking_can_be_omitted_or_hidden():
    deltas = [Delta(reasoning="Hm."), Delta(content="x")]
    assert blocks_of(*deltas, thinking="omitted") == [("thinking", ""), "x"]
    assert blocks_of(*deltas, thinking="hidden") == ["x"]


def test_a_block_is_begun_once():
    blocks = Blocks("shown")
    pieces = [piece for words in ("a", "b") for piece in blocks.take(Delta(content=words))]
    assert pieces == [Piece("text", "a", True), Piece("text", "b", False)]
