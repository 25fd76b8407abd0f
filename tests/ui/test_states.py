"""What the page says when things are not as they should be: no key, no server, a busy or broken one, a restart."""

import pytest

from tests.ui import stub as stub_server
from tests.ui.conftest import fresh


def test_a_key_is_asked_for_kept_for_the_tab_and_never_in_an_address(page, stub):
    stub.keys = ["sesame"]
    page.open()
    page.until(lambda: "This server needs an API key" in page.text("dialog"), "the question")
    page.type("#key", "wrong")
    page.click("Use this key")
    page.until(lambda: "That key was refused" in page.text("dialog"), "a refusal")
    page.type("#key", "sesame")
    page.click("Use this key")
    page.until(lambda: page.text("#model") == "stub-model", "the model")
    page.say("hello")
    assert page.answer() == "You said: hello"
    assert page.js("return JSON.stringify(localStorage) + location.href").count("sesame") == 0
    assert "sesame" in page.js("return JSON.stringify(sessionStorage)")


def test_who_gives_no_key_is_told_and_can_come_back(page, stub):
    stub.keys = ["sesame"]
    page.open()
    page.click("Not now")
    page.click("Enter a key")
    page.type("#key", "sesame")
    page.click("Use this key")
    page.until(lambda: page.text("#model") == "stub-model", "the model")


def test_a_server_that_goes_away_and_comes_back(browser):
    with stub_server.serving() as (url, _):
        page = fresh(browser, url)
        page.say("hello")
    port = int(url.rpartition(":")[2])
    page.say("are you there?", wait=False)
    page.until(lambda: "cannot be reached" in page.text("#notices"), "a line that says so")
    page.until(lambda: "Your message is kept." in page.text(".problem"), "the message is kept")
    with stub_server.serving(port):
        page.until(lambda: "Connected again." in page.text("#notices"), "that it is back")
        page.click("Try again")
        page.until_idle()
        assert page.answer() == "You said: are you there?"
        assert page.text(".assistant .branches") == ""  # what failed is no branch


def test_a_connection_that_breaks_keeps_what_arrived(page):
    page.say("break", wait=False)
    page.until(lambda: "The connection broke" in page.text(".problem"), "a line that says so")
    assert "word5" in page.answer() and "What arrived is kept." in page.text(".problem")
    assert page.count(".assistant .tools button")


def test_a_busy_server_is_asked_again(page, stub):
    stub.num_busy = 2
    page.say("hello", wait=False)
    page.until(lambda: "The engine is starting" in page.text(".status"), "that it waits")
    page.until_idle()
    assert page.answer() == "You said: hello" and len(stub.bodies) == 3


def test_a_restart_of_the_engine_is_said_once_and_the_answer_goes_on(page):
    page.say("restart")
    assert page.answer() == "Before the crash, and after it."
    page.until(lambda: page.count('[data-id="restart"]') == 1, "that it was restarted")
    page.click("Dismiss")
    page.say("hello")
    assert page.count('[data-id="restart"]') == 0


def test_errors_are_shown_as_the_server_says_them(page, stub):
    stub.context_messages = 0
    page.say("context")
    assert "the prompt has 5,000 tokens" in page.text(".problem")
    assert "Drop the oldest turns" not in page.text(".problem")  # there are none


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_empty_page_says_what_can_be_done(page, theme):
    page.theme(theme)
    assert "What would you like to ask?" in page.text()
    page.find(".example").click()
    assert page.find("#message").get_attribute("value")
