import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import registry
from quire.frontend import reasoning
from quire.frontend.chat import ChatTemplate
from quire.frontend.parse import OutputParser
from quire.frontend.reasoning import (
    ernie45,
    gemma4,
    granite,
    harmony,
    hunyuan,
    hy_v3,
    kimi_k2,
    mistral,
    seed_oss,
    think,
)
from quire.frontend.tools import kimi_k2 as kimi_calls
from tests.frontend.tools.transcripts import TEMPLATES, TOOLS, cut, parsed

FORMATS = registry.names("quire.frontend.reasoning")


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def prompt(name: str, **kwargs: object) -> str:
    messages = [{"role": "user", "content": "What does <think> do?"}]
    return ChatTemplate(template(name), bos_token="<s>", eos_token="</s>").render(messages, template_kwargs=kwargs)


@pytest.mark.parametrize(
    "name, format",
    [
        ("Qwen-Qwen3-0.6B", "think"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "think"),
        ("deepseek-ai-DeepSeek-V3.1", "think"),
        ("GLM-4.6", "think"),
        ("openai-gpt-oss-120b", "harmony"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral"),
        ("ByteDance-Seed-OSS", "seed_oss"),
        ("google-gemma-4-31B-it", "gemma4"),
        ("tencent-Hy3", "hy_v3"),
        ("Kimi-K2-Thinking", "kimi_k2"),
        ("MiniMax-M2", "think"),
        ("Qwen3.5-4B", "think"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "think"),
        ("StepFun3.5-Flash", "think"),
        ("moonshotai-Kimi-K2", None),
        ("Qwen-Qwen2.5-7B-Instruct", None),
        ("Qwen3-Coder", None),
        ("meta-llama-Llama-3.1-8B-Instruct", None),
        ("ibm-granite-granite-4.0", None),
        ("Mistral-Small-3.2-24B-Instruct-2506", None),
    ],
)
def test_a_template_chooses_its_way_of_thinking(name: str, format: str | None) -> None:
    assert reasoning.choose(template(name), "qwen3") == format


def test_without_a_template_the_model_type_decides() -> None:
    assert reasoning.choose(None, "qwen3") == "think"
    assert reasoning.choose(None, "gpt_oss") == "harmony"
    assert reasoning.choose(None, "llama") is None


@pytest.mark.parametrize(
    "name, module, kwargs, is_open",
    [
        ("Qwen-Qwen3-0.6B", think, {}, False),
        ("Qwen-Qwen3-0.6B", think, {"enable_thinking": False}, False),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", think, {"enable_thinking": True}, True),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", think, {}, False),
        ("deepseek-ai-DeepSeek-V3.1", think, {"thinking": True}, True),
        ("deepseek-ai-DeepSeek-V3.1", think, {}, False),
        ("GLM-4.7-Flash", think, {}, True),
        ("GLM-4.7-Flash", think, {"enable_thinking": False}, False),
        ("MiniMax-M2", think, {}, True),
        ("ByteDance-Seed-OSS", seed_oss, {}, False),
        ("ByteDance-Seed-OSS", seed_oss, {"thinking_budget": 0}, False),
        ("google-gemma-4-31B-it", gemma4, {"enable_thinking": True}, False),
        ("google-gemma-4-31B-it", gemma4, {}, False),
        ("tencent-Hy3", hy_v3, {"reasoning_effort": "high"}, True),
        ("tencent-Hy3", hy_v3, {}, False),
        ("Kimi-K2-Thinking", kimi_k2, {}, False),
        ("openai-gpt-oss-120b", harmony, {}, False),
        ("mistralai-Ministral-3-14B-Reasoning-2512", mistral, {}, False),
        ("ibm-granite-granite-3.3-2B-Instruct", granite, {"thinking": True}, False),
    ],
)
def test_a_rendered_prompt_tells_whether_thinking_is_open(name, module, kwargs, is_open) -> None:
    assert reasoning.is_open(module, prompt(name, **kwargs)) is is_open


def test_a_users_words_do_not_open_thinking() -> None:
    assert not reasoning.is_open(think, "user: <think>\nassistant:\n")
    assert reasoning.is_open(harmony, "<|start|>assistant<|channel|>analysis<|message|>")


HARMONY = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.<|return|>"
HARMONY_TWICE = HARMONY.replace("<|end|>", "<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>")


@pytest.mark.parametrize(
    "parser, text, thought, answer",
    [
        (think.Parser, "<think>\nI think.\n\nSo.\n</think>\n\nYes.\n", "I think.\n\nSo.", "Yes.\n"),
        (think.Parser, "\n<think>I think.</think>Yes.", "I think.", "Yes."),
        (think.Parser, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (think.Parser, "<think>no end ", "no end", ""),
        (think.Parser, " Yes, <think> and </think> are tags. ", "", " Yes, <think> and </think> are tags. "),
        (think.Parser, "no opening</think> yes", "", "no opening</think> yes"),
        (think.Parser, "<thin", "", "<thin"),
        (think.Parser, "<think>a </thin </think> <think>b</think>", "a </thin", "<think>b</think>"),
        (mistral.Parser, "[THINK]I think.[/THINK]Yes.", "I think.", "Yes."),
        (mistral.Parser, "<think>\nI think.\n</think>\nYes.", "I think.", "Yes."),
        (granite.Parser, "<think>I think.</think>\n<response>Yes.\n</response>", "I think.", "Yes."),
        (granite.Parser, "<think>I think.</think>\nYes.", "I think.", "Yes."),
        (granite.Parser, "<think>I think.</think><response>Yes", "I think.", "Yes"),
        (granite.Parser, "Here is my thought process: I think. Here is my response: Yes.", "I think.", "Yes."),
        (granite.Parser, "Here is my house. <response>", "", "Here is my house. <response>"),
        (ernie45.Parser, "<think>I think.\n</think>\n\n<response>\nYes.\n</response>\n", "I think.", "Yes."),
        (ernie45.Parser, "<think>I think.\n</think>\nYes.", "I think.", "Yes."),
        (ernie45.Parser, "Yes <response>", "", "Yes <response>"),
        (hunyuan.Parser, "<think>\nI think.\n</think>\n<answer>\nYes.\n</answer>", "I think.", "Yes."),
        (hunyuan.Parser, "<think>\n\n</think>\n<answer>\nYes.", "", "Yes."),
        (hy_v3.Parser, "<think:opensource>I think.</think:opensource>Yes.", "I think.", "Yes."),
        (hy_v3.Parser, "<think>Yes", "", "<think>Yes"),
        (seed_oss.Parser, "<seed:think>I </think> think.</seed:think>\nYes.", "I </think> think.", "Yes."),
        (gemma4.Parser, "<|channel>thought\nI think.\n<channel|>Yes.", "I think.", "Yes."),
        (gemma4.Parser, "<|channel>thought\n<channel|>Yes.", "", "Yes."),
        (kimi_k2.Parser, "<think>I think.</think>Yes.", "I think.", "Yes."),
        (kimi_k2.Parser, "<think>I <|tool_calls_section_begin|>x", "I", "<|tool_calls_section_begin|>x"),
        (harmony.Parser, HARMONY, "I think.", "Yes <b>."),
        (harmony.Parser, "<|channel|>final<|message|>Yes.", "", "Yes."),
        (harmony.Parser, "Yes.", "", "Yes."),
        (harmony.Parser, "<|channel|>analysis<|message|>no end", "no end", ""),
        (harmony.Parser, HARMONY_TWICE, "I think.\nMore.", "Yes <b>."),
    ],
)
def test_thinking_and_answer_come_apart(parser, text: str, thought: str, answer: str) -> None:
    assert parsed(parser(False), text) == (answer, thought, [])
    assert parsed(parser(False), list(text)) == (answer, thought, [])


@pytest.mark.parametrize(
    "module, text",
    [
        (think, "I think.\n</think>\n\nYes."),
        (think, "<think>\nI think.\n</think>\n\nYes."),  # some models open it once more
        (mistral, "I think.[/THINK]Yes."),
        (granite, "I think.</think><response>Yes.</response>"),
        (ernie45, "I think.\n</think>\n\n<response>\nYes.\n</response>\n"),
        (hy_v3, "I think.</think:opensource>Yes."),
        (seed_oss, "I think.</seed:think>Yes."),
        (harmony, "I think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"),
    ],
)
def test_thinking_that_the_prompt_opened_goes_on(module, text: str) -> None:
    assert parsed(module.Parser(True), text) == ("Yes.", "I think.", [])
    assert parsed(module.Parser(True), list(text)) == ("Yes.", "I think.", [])


FRAGMENTS = [
    *"<think> </think> [THINK] [/THINK] <response> </response>".split(),
    *"<seed:think> </seed:think> <|channel>thought <channel|> <answer> </answer> <think:opensource>".split(),
    *("</think:opensource>", "<|tool_calls_section_begin|>", "Here is my thought process:", "Here is my response:"),
    *"<|channel|> analysis final <|message|> <|end|> <|start|> assistant".split(),
    *(" to=functions.f", "<", "[", "Here", " ", "\n", "x", "é"),
]


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join),
    starts_open=st.booleans(),
    positions=st.lists(st.integers(0, 300), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_of_any_text_gives_the_same(name: str, text: str, starts_open: bool, positions: list[int]) -> None:
    parser = registry.load("quire.frontend.reasoning", name).Parser
    whole = parsed(parser(starts_open), text)
    assert parsed(parser(starts_open), cut(text, positions)) == whole
    assert parsed(parser(starts_open), list(text)) == whole


def test_reasoning_streams_as_it_comes() -> None:
    parser = think.Parser(False)
    pieces = ["<think>", "\nOne", " two", " \n", "three", "</thi", "nk>"]
    thoughts = ["", "One", " two", "", " \nthree", "", ""]
    assert [parser.feed(piece).reasoning for piece in pieces] == thoughts


def test_calls_end_thinking_that_was_not_closed() -> None:
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<think>I look. <|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    for pieces in (text, list(text)):
        parser = OutputParser(kimi_k2.Parser(False), kimi_calls.Parser(TOOLS))
        assert parsed(parser, pieces) == ("", "I look.", [("now", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_marks_are_what_the_parser_reads(name: str) -> None:
    module = registry.load("quire.frontend.reasoning", name)
    assert parsed(module.Parser(False), f"{module.START}thought{module.END}")[:2] == ("", "thought")
