"""What a person sees of a chat: answers, thinking, calls, branches, parameters, comparing, files, shortcuts."""

import json

import pytest
from selenium.webdriver.common.keys import Keys

from tests.ui.conftest import Page
from tests.ui.stub import Stub


def body(stub: Stub) -> dict:
    """What was asked last."""
    return stub.bodies[-1]


def test_an_answer_is_rendered_as_markdown(page):
    page.say("markdown")
    assert page.text(".assistant .text h4") == "A heading"
    assert page.text(".assistant em") == "emphasis"
    assert page.text(".assistant strong") == "strong words"
    assert page.text(".assistant del") == "struck"
    assert page.text(".assistant ol > li ul li").split("\n") == ["nested", "list"]
    assert page.text(".assistant td.right").split("\n") == ["1", "22"]
    assert page.text(".assistant blockquote") == "A quotation"
    link = page.find(".assistant .text a")
    assert link.get_attribute("href") == "https://example.com/page"
    assert "noopener" in link.get_attribute("rel") and link.get_attribute("target") == "_blank"
    assert page.answer().endswith("The end.")
    assert page.console() == []


def test_code_has_colours_and_can_be_copied(page):
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.say("markdown")
    assert page.text(".assistant figure figcaption span") == "python"
    assert page.text(".assistant figure .c-key").split("\n") == ["def", "return"]
    assert page.text(".assistant figure .c-com") == "# says hello"
    page.click("Copy code")
    page.until(lambda: page.count(".assistant figure [data-said=Copied]"), "the word Copied")
    copied = page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == 'def greet(name):  # says hello\n    return "Hello, " + name'


def test_thinking_is_folded(page):
    page.say("thinking")
    assert page.answer() == "The answer is 42."
    assert page.text(".thinking summary").startswith("Thought for")
    assert not page.js("return document.querySelector('.thoughts').checkVisibility()")
    page.find(".thinking summary").click()
    page.until(lambda: "First I look at the question." in page.text(".thoughts"), "the thoughts")


def test_tool_calls_are_shown_and_take_results(page, stub):
    page.set("tools", '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]')
    page.say("tool")
    assert body(stub)["tools"][0]["function"]["name"] == "weather"
    assert page.text(".call summary").split() == ["Calls", "weather"]
    assert json.loads(page.text(".call code[dir]")) == {"city": "Paris", "days": 2}
    page.type('[aria-label="Result of weather"]', "rain")
    page.click("Send result")
    page.until_idle()
    assert page.answer() == "The tool said: rain"
    call, result = body(stub)["messages"][-2:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == "call_1"


def test_figures_of_an_answer(page, stub):
    page.say("slow hello")
    figures = page.text(".figures")
    assert "tokens" in figures and "first after" in figures and "32 of 40 prompt tokens cached" in figures
    assert body(stub)["stream_options"] == {"include_usage": True}
    assert "of 4,096 tokens" in page.text(".room")


def test_stop_keeps_what_is_there_and_continue_goes_on(page, stub):
    page.say("slow", wait=False)
    page.until(lambda: "word5" in page.answer(), "some words")
    page.click("Stop")
    page.until_idle(2)
    assert "Stopped." in page.text(".assistant")
    kept = page.answer()
    page.click("Continue")
    page.until(lambda: len(page.answer()) > len(kept) + 20, "more words")
    page.keys(Keys.ESCAPE)
    page.until_idle(2)
    assert page.answer().startswith(kept)
    asked = body(stub)
    assert asked["continue_final_message"] is True and asked["messages"][-1]["role"] == "assistant"


def test_regenerating_and_editing_make_branches(page, stub):
    page.say("first")
    page.click("Regenerate")
    page.until_idle()
    assert page.text(".assistant .branches") == "2/2"
    page.click("Earlier version", ".assistant")
    assert page.text(".assistant .branches") == "1/2"

    page.click("Edit")
    page.type('[aria-label="Edit the message"]', "second")
    page.click("Send", ".editing")
    page.until_idle()
    assert page.answer() == "You said: second"
    assert page.text(".user .branches") == "2/2"
    assert [message["content"] for message in body(stub)["messages"]] == ["second"]
    page.click("Earlier version", ".user")
    assert page.answer() == "You said: first"


def test_parameters_are_sent_and_their_defaults_shown(page, stub):
    page.set("top_k", "40")
    temperature = page.find("#param-temperature")
    page.until(lambda: temperature.get_attribute("placeholder") == "0.2", "the model's own default")
    assert page.find("#param-min_p").get_attribute("placeholder") == "0"  # the API's
    page.set("stop", "END\nSTOP")
    page.set("ignore_eos", "yes")
    page.set("logit_bias", '{"5": -100}')
    page.set("other", '{"user": "me"}')
    page.type("#system", "Be brief.")
    page.say("hello")
    asked = body(stub)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    sent = {name: asked[name] for name in ("top_k", "stop", "ignore_eos", "logit_bias", "user")}
    assert sent == {"top_k": 40, "stop": ["END", "STOP"], "ignore_eos": True, "logit_bias": {"5": -100}, "user": "me"}
    assert "temperature" not in asked and "min_p" not in asked
    page.click("Reset to defaults")
    page.say("hello again")
    assert "top_k" not in body(stub)


def test_a_wrong_parameter_is_named_and_nothing_is_sent(page, stub):
    page.set("temperature", "hot")
    assert page.text(".field-problem").strip() == "temperature must be a number."
    page.say("hello")
    assert "temperature must be a number." in page.text("#notices")
    assert stub.bodies == [] and page.find("#message").get_attribute("value") == "hello"


def test_every_sampling_parameter_of_the_api_is_there(page):
    from quire.params import SamplingParams

    not_of_chat = {"logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs", "detokenize", "output_kind"}
    elsewhere = {"structured_outputs", "extra_args", "skip_reading_prefix_cache"}  # the shape; other fields
    page.click("Parameters")
    shown = {
        name.removeprefix("param-")
        for name in page.js("return [...document.querySelectorAll('#panel [id]')].map(e => e.id)")
    }
    assert set(SamplingParams.__struct_fields__) - not_of_chat - elsewhere <= shown


def test_a_schema_is_pasted_and_asked_for(page, stub):
    page.click("Parameters")
    page.js("const s = document.querySelector('#shape'); s.value = 'schema'; s.dispatchEvent(new Event('change'))")
    page.type("#shape-text", '{"type": "object"')
    assert "must be JSON" in page.text(".field-problem")
    page.find("#shape-text").send_keys("}")
    page.say("hello")
    form = body(stub)["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["schema"] == {"type": "object"}


def test_hovering_a_token_shows_its_alternatives(page, stub):
    page.set("top_logprobs", "2")
    page.say("hello")
    assert body(stub)["logprobs"] is True and body(stub)["top_logprobs"] == 2
    page.click("Tokens and alternatives")
    tokens = page.all(".token")
    assert "".join(token.text for token in tokens).replace(" ", "") == "Yousaid:hello"
    page.hover(tokens[1])
    page.until(lambda: page.count(".alternatives"), "the alternatives")
    assert "other" in page.text(".alternatives") and "81.9 %" in page.text(".alternatives")
    page.js("arguments[0].focus()", tokens[0])
    page.keys(Keys.ARROW_RIGHT)
    assert page.js("return document.activeElement.dataset.idx") == "1"
    page.click("Tokens and alternatives")
    assert page.answer() == "You said: hello"


def test_two_panes_answer_one_prompt_with_their_own_parameters(page, stub):
    page.click("Compare two panes")
    page.click("Pane A")
    page.set("temperature", "0")
    page.click("Pane B")
    page.set("temperature", "1.5")
    page.say("hello")
    assert sorted(asked["temperature"] for asked in stub.bodies) == [0, 1.5]
    assert page.text(".pane-head").split("\n") == ["A · temperature 0", "B · temperature 1.5"]
    assert [element.text for element in page.all(".pane .assistant .text")] == ["You said: hello"] * 2
    page.say("again")
    assert len(stub.bodies) == 4 and {len(asked["messages"]) for asked in stub.bodies[2:]} == {3}
    page.click("Compare two panes")
    assert page.count(".pane") == 1


def test_text_files_are_attached(page, stub, tmp_path):
    (tmp_path / "notes.md").write_text("the secret is ```plum```")
    page.find("#composer input[type=file]").send_keys(str(tmp_path / "notes.md"))
    page.until(lambda: "notes.md" in page.text(".chips"), "the file")
    page.say("what is the secret?")
    content = body(stub)["messages"][0]["content"]
    assert "File notes.md" in content and "plum" in content and content.endswith("what is the secret?")
    assert "notes.md" in page.text(".bubble")

    (tmp_path / "photo.png").write_bytes(b"\x89PNG\0\xff")
    page.find("#composer input[type=file]").send_keys(str(tmp_path / "photo.png"))
    page.until(lambda: "not a text file" in page.text("#notices"), "a refusal")


def test_a_text_file_that_is_dropped_is_attached(page, stub):
    page.js(
        "const data = new DataTransfer(); data.items.add(new File(['plums'], 'list.txt', {type: 'text/plain'}));"
        "document.querySelector('#message').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}))"
    )
    page.until(lambda: "list.txt" in page.text(".chips"), "the file")
    page.say("what is on it?")
    assert "plums" in body(stub)["messages"][0]["content"]


def paste(page: Page, text: str) -> None:
    page.js(
        "const data = new DataTransfer(); data.setData('text/plain', arguments[0]);"
        "document.querySelector('#message').dispatchEvent("
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}))",
        text,
    )


def test_a_long_paste_becomes_a_file(page, stub):
    paste(page, "line\n" * 1000)
    page.until(lambda: "Pasted text 1.txt" in page.text(".chips"), "the file")
    assert page.find("#message").get_attribute("value") == ""
    page.click("Pasted text 1.txt")
    page.click("Put into the message")
    page.until(lambda: page.find("#message").get_attribute("value").startswith("line\nline"), "the text")
    assert page.text(".chips") == ""


def test_a_full_context_offers_to_drop_the_oldest_turns(page, stub):
    for text in ("one", "two", "three"):
        page.say(text)
    page.say("context")
    page.until(lambda: "The context is full" in page.text(".problem"), "the card")
    page.click("Drop the oldest turns")
    page.until_idle()
    page.until(lambda: page.answer() == "You said: context", "an answer")
    assert [message["content"] for message in body(stub)["messages"] if message["role"] == "user"] == [
        "three",
        "context",
    ]
    assert "no longer sent" in page.text(".dropped")
    page.say("next")
    assert [message["content"] for message in body(stub)["messages"]][0] == "three"


def test_shortcuts(page):
    page.say("first message")
    page.keys(Keys.CONTROL, "/")
    assert "Search conversations" in page.text("dialog")
    page.keys(Keys.ESCAPE)
    page.keys(Keys.CONTROL, "k")
    assert page.js("return document.activeElement.id") == "search"
    page.keys(Keys.CONTROL, Keys.SHIFT, "o")
    page.until(lambda: page.count(".empty"), "a new conversation")
    page.say("second message")
    page.find("#message").send_keys(Keys.ARROW_UP)
    assert page.js("return document.activeElement.value") == "second message"
    page.keys(Keys.ESCAPE)
    page.keys(Keys.ALT, "c")
    assert page.count(".pane") == 2
    page.keys(Keys.ALT, "2")
    page.until(lambda: page.js("return location.hash") == "#engine", "the engine view")
    page.keys(Keys.ALT, "1")


def test_shortcuts_of_what_is_shown_and_of_the_open_conversation(page):
    page.say("hello")
    for key, part in (("b", "#sidebar"), (".", "#panel")):
        is_seen = f"return document.querySelector('{part}').checkVisibility({{visibilityProperty: true}})"
        before = page.js(is_seen)
        page.keys(Keys.CONTROL, key)
        page.until(lambda is_seen=is_seen, before=before: page.js(is_seen) is not before, part)
        page.keys(Keys.CONTROL, key)
        page.until(lambda is_seen=is_seen, before=before: page.js(is_seen) is before, part)
    theme = "return document.documentElement.dataset.theme"
    before = page.js(theme)
    page.keys(Keys.ALT, "t")
    assert page.js(theme) != before
    page.keys(Keys.ALT, "r")
    page.until_idle()
    assert page.text(".assistant .branches") == "2/2"
    page.keys(Keys.ALT, "2")
    page.until(lambda: page.js("return location.hash") == "#engine", "the engine view")
    page.keys(Keys.CONTROL, Keys.SHIFT, Keys.BACKSPACE)  # what is not seen is not deleted
    page.keys(Keys.ALT, "1")
    page.until(lambda: page.answer() == "You said: hello", "the conversation")
    page.keys(Keys.ALT, "1")  # it is there already
    page.keys(Keys.CONTROL, Keys.SHIFT, Keys.BACKSPACE)
    page.until(lambda: not page.count(".entry"), "an empty list")


def test_the_way_back_from_the_engine_leads_to_the_conversation_that_was_open(page):
    page.say("slow", wait=False)
    page.until(lambda: "word3" in page.answer(), "some words")
    page.find("#to-engine").click()
    page.until(lambda: page.js("return location.hash") == "#engine", "the engine view")
    page.find("#to-chat").click()
    page.until(lambda: "word20 " in page.answer() + " ", "the answer, which went on")
    page.click("Stop")
    page.until_idle()


def test_the_theme_is_the_systems_until_one_is_chosen(page):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.theme("dark")
    dark = page.js(background)
    assert light != dark
    page.find("#theme").click()  # light
    assert page.js(background) == light
    page.open()
    assert page.js(background) == light


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 780)
    page.open()
    page.say("markdown")
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.find("#message").is_displayed()
