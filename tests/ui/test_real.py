"""The page in front of the real server: SmolLM2 answers, follows a schema, hits the prefix cache, survives a crash."""

import json
import os
import re
import signal
from pathlib import Path

from tests.scripted import script
from tests.serving import ServerProcess
from tests.ui.conftest import fresh

QWEN = Path(__file__).parents[1] / "data/templates/Qwen-Qwen2.5-7B-Instruct.jinja"


def test_an_answer_with_its_figures_and_no_console_errors(real):
    real.set("temperature", "0")
    real.set("max_tokens", "24")
    real.say("What is the capital of France?")
    assert "Paris" in real.answer()
    assert re.search(
        r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ m?s · \d+ of \d+ prompt tokens cached",
        real.text(".figures"),
    )
    assert real.console() == []


def test_the_next_turn_finds_its_prefix_in_the_cache(real):
    real.set("max_tokens", "16")
    real.say("Name three colours of the rainbow, and say why you chose them.")
    real.say("And three more?")
    cached = re.findall(r"(\d+) of (\d+) prompt tokens cached", real.text(".figures"))[-1]
    assert int(cached[0]) > 0


def test_an_answer_follows_a_pasted_schema(real):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    real.click("Parameters")
    real.js("const s = document.querySelector('#shape'); s.value = 'schema'; s.dispatchEvent(new Event('change'))")
    real.type("#shape-text", json.dumps(schema))
    real.set("max_tokens", "64")
    real.say("What is the capital of France?")
    assert json.loads(real.answer())["city"] in ("Paris", "Rome")


def test_logprobs_of_the_real_model(real):
    real.set("temperature", "0")
    real.set("top_logprobs", "5")
    real.set("max_tokens", "8")
    real.say("What is the capital of France?")
    real.click("Tokens and alternatives")
    assert real.count(".token") == 8
    real.hover(real.all(".token")[0])
    real.until(lambda: real.count(".alternative") == 5, "five alternatives")


def test_several_answers_at_once_are_branches(real):
    real.set("n", "3")
    real.set("max_tokens", "8")
    real.say("Say a word.")
    assert real.text(".assistant .branches") == "1/3"
    real.click("Later version")
    assert real.text(".assistant .branches") == "2/3" and real.answer()


def test_a_full_context_is_a_state_of_its_own(real):
    real.set("max_tokens", "4")
    for _ in range(3):
        real.js(
            "const m = document.querySelector('#message'); m.value = 'a word '.repeat(200);"
            "m.dispatchEvent(new Event('input'))"
        )
        real.click("Send")
        real.until_idle()
        if real.count(".problem"):
            break
    assert "The context is full" in real.text(".problem")
    real.click("Drop the oldest turns")
    real.until_idle()
    assert not real.count(".problem") and real.answer()


def test_the_answer_goes_on_when_the_engine_is_killed_and_the_page_says_so_once(real, server):
    real.set("temperature", "0")
    real.set("ignore_eos", "yes")
    real.set("max_tokens", "160")
    real.say("Tell me a story about a lighthouse.", wait=False)
    real.until(lambda: len(real.answer()) > 60, "some words")
    os.kill(server.core_pid(), signal.SIGKILL)
    real.until_idle(60)
    assert "160 tokens" in real.text(".figures")
    real.until(lambda: real.count('[data-id="restart"]') == 1, "that it was restarted")
    assert "went on where they were" in real.text("#notices")
    assert real.console() == []
    real.click("Dismiss", "#notices")
    real.say("Thanks.", wait=False)
    real.click("Stop")
    real.until_idle()
    assert real.count('[data-id="restart"]') == 0


def test_a_server_with_keys(browser, smollm2):
    flags = ["--executor", "echo", "--api-key", "open-sesame", "--max-model-len", "512"]
    with ServerProcess("smollm2", *flags) as server:
        page = fresh(browser, server.url)
        page.until(lambda: "needs an API key" in page.text("dialog"), "the question")
        page.type("#key", "open-sesame")
        page.click("Use this key")
        page.until(lambda: page.text("#model") == "smollm2", "the model")
        page.say("hello there")
        assert page.answer()
        assert "open-sesame" not in server.log()


def test_thinking_and_tool_calls_as_the_real_server_tells_them(browser, smollm2):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    system = script(f"<think>I should look outside.</think>{call}", "<think>It said so.</think>The weather: {last}")
    flags = ["--executor", "tests.scripted", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with ServerProcess("smollm2", *flags, "--chat-template", str(QWEN)) as server:
        page = fresh(browser, server.url)
        page.set("tools", json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {}}}]))
        page.js(
            "const s = document.querySelector('#system'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            system,
        )
        page.say("What is the weather in Paris?")
        assert page.text(".call summary").split() == ["Calls", "weather"]
        page.find(".thinking summary").click()
        page.until(lambda: page.text(".thoughts") == "I should look outside.", "the thoughts")
        page.type('[aria-label="Result of weather"]', "rain")
        page.click("Send result")
        page.until_idle()
        assert page.answer() == "The weather: rain"
        assert page.console() == []
