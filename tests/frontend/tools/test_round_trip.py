"""Calls rendered by a model's real chat template parse back to what they were made from."""

import json

import pytest

from quire import registry
from quire.frontend import tools
from tests.frontend.tools.transcripts import CASES, SOURCES, TEMPLATES, TOOLS, Source, parsed

ids = [f"{source.format}-{source.template}" for source in SOURCES]


def parser(source: Source):
    return registry.load("quire.frontend.tools", source.format).Parser(TOOLS)


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_calls_of_the_real_template_come_back(source: Source) -> None:
    assert "one" in source.cases and "nested" in source.cases
    for case in source.cases:
        content, reasoning, calls = parsed(parser(source), source.transcript(CASES[case]))
        assert [(name, json.loads(arguments)) for name, arguments in calls] == CASES[case], case
        assert (content, reasoning) == ("", "")


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_every_cut_gives_the_same_deltas_in_sum(source: Source) -> None:
    for case in source.cases:
        text = source.transcript(CASES[case])
        whole = parsed(parser(source), text)
        assert parsed(parser(source), list(text)) == whole
        for size in (2, 3, 5, 11):
            assert parsed(parser(source), [text[at : at + size] for at in range(0, len(text), size)]) == whole


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_words_around_calls_are_content_wherever_the_text_is_cut(source: Source) -> None:
    if source.format == "harmony":  # whose words have headers of their own
        return
    case = "two" if "two" in source.cases else "one"
    text = f"Let me look.\n{source.transcript(CASES[case])}\nDone."
    content, reasoning, calls = parsed(parser(source), text)
    assert (content.split(), reasoning) == (["Let", "me", "look.", "Done."], "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CASES[case]
    for place in range(1, len(text)):
        assert parsed(parser(source), [text[:place], text[place:]]) == (content, "", calls)


WITHOUT_TEMPLATE = {"olmo3", "ernie45", "longcat", "xlam", "hunyuan"}  # found by name only


def test_every_format_has_a_real_template_or_is_found_by_name_only() -> None:
    names = set(registry.names("quire.frontend.tools"))
    assert {source.format for source in SOURCES} == names
    assert {
        source.format for source in SOURCES if source.template != "google-gemma-2-2b-it"
    } == names - WITHOUT_TEMPLATE
    marks = registry.literals("quire.frontend.tools", "TEMPLATE_MARKS")
    assert {name for name in names if not marks[name]} == WITHOUT_TEMPLATE


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_the_template_chooses_its_format(source: Source) -> None:
    text = (TEMPLATES / f"{source.template}.jinja").read_text()
    if source.spell is None or source.format in ("granite", "phi4"):
        assert tools.choose(text, "llama") == source.format


def test_without_a_template_the_model_type_decides() -> None:
    assert tools.choose(None, "qwen3") == "hermes"
    assert tools.choose(None, "gpt_oss") == "harmony"
    assert tools.choose(None, "llama") is None
    assert tools.choose((TEMPLATES / "google-gemma-2-2b-it.jinja").read_text(), "gemma2") is None


def test_a_template_with_an_unknown_format_is_not_taken_for_another() -> None:
    text = (TEMPLATES / "Qwen3-Coder.jinja").read_text().replace("<function=", "<function ")
    assert "<tool_call>" in text
    assert tools.choose(text, "qwen3_moe") is None


@pytest.mark.parametrize("source", [s for s in SOURCES if s.format == "hermes"], ids=lambda s: s.template)
def test_words_before_calls_are_content_without_the_space_between(source: Source) -> None:
    content, _, calls = parsed(parser(source), source.transcript(CASES["two"], "Let me look."))
    assert content in ("Let me look.", "")  # Hermes' own template leaves the words out
    assert len(calls) == 2
