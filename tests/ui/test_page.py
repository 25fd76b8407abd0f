"""The page as a whole: what its files may hold, how large it is, how fast it is there, who can use it."""

import re
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

import quire

FOLDER = Path(quire.__file__).parent / "ui"
FILES = sorted(FOLDER.iterdir())
MAX_BYTES = 300_000
MAX_FIRST_PAINT_MS = 300
FIRST_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
FORBIDDEN = {
    "markup made of text": r"(?:inner|outer)HTML|insertAdjacent|document\.write|ContextualFragment|DOMParser|srcdoc",
    "code made of text": r"\beval\b|new Function|setTimeout\(\s*[\"'`]|setInterval\(\s*[\"'`]|[\"'`]javascript:",
    "inline style": r"\sstyle=|\.style\s*=|setAttribute\(\s*[\"']style|cssText|<style",
    "inline script or handler": r"<script(?![^>]*\ssrc=)|\son[a-z]+=[\"']",
    "another host": r"(?:src|href)=[\"']?(?:https?:)?//|import\s+[^;]*[\"']https?:",
}


def test_the_files_are_few_and_small():
    assert {file.suffix for file in FILES} == {".html", ".js", ".css"}
    assert sum(file.stat().st_size for file in FILES) <= MAX_BYTES


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    for file in FILES:
        found = re.search(FORBIDDEN[what], file.read_text())
        assert found is None, f"{file.name}: {found[0]!r}"


def test_every_module_says_what_it_is():
    for file in FILES:
        if file.suffix == ".js":
            assert file.read_text().startswith("// "), file.name


def test_nothing_goes_wrong_and_the_first_paint_is_soon(page):
    times = []
    for _ in range(3):
        page.open()
        page.until(lambda: page.text("#model") == "stub-model", "the model")
        times.append(page.until(lambda: page.js(FIRST_PAINT), "a first paint"))
    assert min(times) < MAX_FIRST_PAINT_MS
    assert page.console() == []


def test_only_this_server_is_asked(page):
    page.say("hostile")
    hosts = page.js("return performance.getEntriesByType('resource').map(e => new URL(e.name).origin)")
    assert set(hosts) == {page.url}


def prepared(page, state: str) -> None:
    if state == "answers":
        page.set("top_logprobs", "2")
        page.say("markdown")
        page.say("thinking")
        page.say("tool")
    elif state == "tokens":
        page.set("top_logprobs", "2")
        page.say("hello")
        page.click("Tokens and alternatives")
    elif state == "compare":
        page.click("Compare two panes")
        page.say("hello")
    elif state == "shortcuts":
        page.keys(Keys.CONTROL, "/")
    elif state == "problem":
        page.say("context")
        page.say("context")
        page.say("context")


@pytest.mark.parametrize("state", ["empty", "answers", "tokens", "compare", "shortcuts", "problem"])
def test_accessibility(page, axe, state):
    prepared(page, state)
    assert page.accessibility(axe) == []
    page.theme("dark")
    assert page.accessibility(axe) == []


def test_accessibility_at_phone_width(page, axe):
    page.resize(390, 780)
    page.open()
    page.say("markdown")
    page.find("#open-sidebar").click()
    assert page.accessibility(axe) == []


def test_everything_can_be_reached_with_the_keyboard(page):
    page.say("hello")
    page.js("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keys(Keys.TAB)
        reached.add(
            page.js("const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.innerText")
        )
    wanted = {
        "open-sidebar",
        "to-engine",
        "theme",
        "open-panel",
        "new",
        "search",
        "Delete hello",
        "Edit",
        "Regenerate",
        "message",
    }
    assert wanted <= reached
