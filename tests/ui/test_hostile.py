"""Hostile output: nothing of it runs, is loaded or followed; the page stays usable however much there is."""

import time

from tests.ui.stub import MILLION

MAX_HEAP = 500 << 20


def test_markup_scripts_and_links_of_an_answer_do_nothing(page):
    page.say("hostile")
    assert page.js("return window.hacked") is None
    inside = "return document.querySelectorAll('.assistant .text :is(script, img, style, iframe, object, b)').length"
    assert page.js(inside) == 0
    links = page.js("return [...document.querySelectorAll('.assistant .text a')].map(a => a.href)")
    assert links == ["https://example.com/"]
    shown = page.answer()
    assert "<script>window.hacked = 1</script>" in shown
    assert "image: picture (https://example.com/tracker.png)" in shown
    assert page.console() == []


def test_characters_that_reorder_text_or_talk_to_terminals_are_shown(page):
    page.say("hostile")
    shown = page.answer()
    assert "\u202e" not in shown and "\x1b" not in shown and "\x07" not in shown
    assert "[U+202E]right to left override" in shown and "\u241b[31mred" in shown
    assert page.text(".c-hidden").split("\n") == ["U+202E", "U+2066"]
    directions = "return [...document.querySelectorAll('.assistant .text > :is(p, h4, ul, ol)')].map(e => e.dir)"
    assert set(page.js(directions)) == {"auto"}


def test_a_huge_table_is_cut(page):
    page.say("table")
    assert page.count(".assistant tbody tr") == 500
    assert "2999" in page.text(".assistant .text")
    assert page.count(".assistant *") < 25_000


def test_a_line_without_end_stays_cheap(page):
    started = time.monotonic()
    page.say("line")
    assert time.monotonic() - started < 20
    assert page.count(".assistant *") < 40_000
    page.until(lambda: page.count(".cut") == 1, "the end of drawing")


def test_a_million_tokens_can_be_stopped_at_once(page):
    page.say("million", wait=False)
    page.until(lambda: page.count(".cut"), "a long answer", 60)
    took_ms = page.driver.execute_async_script(
        "const done = arguments[0], t0 = performance.now(), b = document.querySelector('.send'); b.click();"
        "const isOver = () => b.getAttribute('aria-label') === 'Send';"
        "const look = () => isOver() ? done(performance.now() - t0) : setTimeout(look, 5); look();"
    )
    assert took_ms < 1000
    assert "Stopped." in page.text(".assistant")


def test_a_million_tokens_are_held_and_the_page_answers_meanwhile(page):
    page.say("million", wait=False)
    slowest = heap = 0.0
    busy = "return document.querySelector('.send').getAttribute('aria-label') === 'Stop'"
    while page.js(busy):
        started = time.monotonic()
        page.js("return 1")
        slowest = max(slowest, time.monotonic() - started)
        heap = max(heap, page.heap_bytes())
        time.sleep(0.2)
    assert slowest < 1 and heap < MAX_HEAP
    assert page.count(".assistant *") < 40_000
    assert f"{MILLION:,} tokens" in page.text(".figures")
    page.say("hello")
    assert page.answer() == "You said: hello"
