"""The engine view in a real browser, against a stub that streams what docs/live.md describes."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.conftest import fresh
from tests.ui.engine_page import THIN, EnginePage
from tests.ui.engine_stub import NODE_COLUMNS, EngineStub, Simulation


@pytest.fixture(scope="module")
def engine_stub() -> Iterator[EngineStub]:
    with EngineStub() as stub:
        yield stub


@pytest.fixture
def engine(browser, engine_stub) -> EnginePage:
    """Before the view is opened; the simulation runs."""
    engine_stub.drop()
    engine_stub.reset()
    page = EnginePage(browser, engine_stub.url)
    page.stub = engine_stub
    if not browser.current_url.startswith(engine_stub.url):
        fresh(browser, engine_stub.url)
    page.resize(1280, 860)
    page.theme("light")
    page.js("sessionStorage.clear()")
    return page


@pytest.fixture
def frozen(browser, engine_stub, request) -> EnginePage:
    """The view of a simulation that stands still: what is shown can be compared with it. A view that is open already
    is used again."""
    page = EnginePage(browser, engine_stub.url)
    page.stub = engine_stub
    if not browser.current_url.startswith(engine_stub.url) or "Live" not in page.text(".engine-head"):
        request.getfixturevalue("engine")
    engine_stub.reset(is_frozen=True)
    if not page.text(".headline"):
        return page.enter()
    page.resize(1280, 860)
    page.theme("light")
    page.js("document.querySelectorAll('.id[aria-expanded=true]').forEach(button => button.click())")
    page.js("document.activeElement.blur()")
    page.hover(page.find(".engine h1"))
    page.after_updates(2)
    return page


def update_of(page: EnginePage) -> dict[str, Any]:
    return page.stub.simulation.update()


def core_of(page: EnginePage) -> dict[str, Any]:
    return update_of(page)["core"]


# ---- what is shown ----


def test_the_headline_tells_load_speed_latency_and_memory(frozen):
    core = core_of(frozen)
    shown = frozen.headline()
    assert shown["Running"] == str(core["counts"]["running"])
    assert shown["Waiting"] == str(core["counts"]["waiting"])
    assert shown["Answer tokens/s"] == f"{core['rates']['decode_tokens_s']:,.0f}"
    assert shown["First token"] == "48 ms"
    pool = core["kv"]["pools"][0]
    assert shown["KV in use"] == f"{100 * pool['owned'] / pool['blocks']:.0f} %"
    assert shown["Preemptions"] == str(core["counts"]["preemptions"])


def test_figures_move_with_the_engine(engine):
    engine.enter()
    seen = set()
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and len(seen) < 6:
        seen.add(engine.text(".progress"))
        time.sleep(0.05)
    assert len(seen) >= 6, "progress does not move several times a second"


def test_percentiles_are_a_table(frozen):
    assert frozen.cells(".latency tbody tr") == [
        ["First token", "48 ms", "91 ms", "149 ms", "8"],
        ["Each token after", "21 ms", "41 ms", "66 ms", "8"],
        ["Whole request", "3.82 s", "7.26 s", "11.8 s", "8"],
    ]


def test_charts_say_in_words_what_they_draw(frozen):
    core = core_of(frozen)
    steps = core["steps"]
    assert f"answers: {steps['decode'][-1]} now, {max(steps['decode'])} at most" in frozen.chart("Batch of each step")
    assert f"prompts: {steps['prefill'][-1]} now, {max(steps['prefill']):,} at most" in frozen.chart(
        "Batch of each step"
    )
    assert f"device: {steps['device_ms'][-1]:.0f} ms now" in frozen.chart("Time of each step")
    assert f"running: {core['history']['running'][-1]} now" in frozen.chart("Requests")
    assert "% now" in frozen.chart("KV memory in use")
    assert "answers:" in frozen.chart("Tokens per second")
    drawn = frozen.js("return [...document.querySelectorAll('.plot .fill')].map(p => p.getAttribute('d').length)")
    assert len(drawn) == 9 and all(length > 100 for length in drawn)


def test_pointing_at_a_chart_shows_the_values_of_then(frozen):
    plot = frozen.js("return document.querySelector('svg.plot[aria-label^=\"Requests,\"]')")
    frozen.hover(plot)  # its middle
    figure = frozen.js("return arguments[0].closest('figure').innerText", plot).replace(THIN, " ")
    running = core_of(frozen)["history"]["running"]
    assert "30 s ago" in figure
    assert f"running {running[-1 - 60]}" in figure


def test_requests_are_listed_by_what_they_do(frozen):
    simulation = frozen.stub.simulation
    groups = frozen.text(".group-row").splitlines()
    assert groups[0] == f"Running {len(simulation.running)}"
    assert groups[-1] == f"Ended {len(simulation.ended)}"
    request = next(r for r in simulation.running if r.phase == "decode")
    numbers = [request.prompt, request.cached, len(request.blocks), request.preemptions]
    progress = f"{request.output} of {request.max_output}"
    assert frozen.row(request.id)[:-1] == [request.id, "Decode", progress, *(f"{n:,}" for n in numbers)]


def test_a_prefill_shows_how_much_of_the_prompt_is_computed(frozen):
    def change(update):
        update["core"]["requests"]["rows"][0][1:7] = ["prefill", 3000, 0, 2048, 0, 128]
        return update

    frozen.stub.change = change
    frozen.says("2,048 of 3,000")
    width = frozen.js("return document.querySelector('.bar .prefill').getAttribute('width')")
    assert float(width) == pytest.approx(100 * 2048 / 3000, abs=0.1)


def test_requests_that_are_not_listed_are_counted(frozen):
    def change(update):
        update["core"]["requests"]["left_out"] = [17, 0]
        return update

    frozen.stub.change = change
    frozen.says("and 17 more that are not listed")


def test_a_request_opens_to_its_timeline_with_preemptions(frozen):
    simulation = frozen.stub.simulation
    request = next(r for r in [*simulation.running, *simulation.ended] if r.preemptions > 0)
    frozen.toggle(request.id)
    text = frozen.until(lambda: frozen.text(".timeline"), "the timeline")
    assert f"Prompt of {request.prompt:,} tokens" in text
    assert f"preempted {request.preemptions} time" in text
    kinds = frozen.js("return [...document.querySelectorAll('.spans li .swatch')].map(s => s.classList[1])")
    assert kinds == [span[0] for span in request.timeline[-16:]]
    assert frozen.count(".strip rect") == len(kinds)
    assert "Waited" in text and "Preempted: its blocks were taken away" in text
    frozen.toggle(request.id)
    frozen.until(lambda: not frozen.text(".timeline"), "the timeline's end")


def test_an_open_request_stays_when_it_has_left_the_update(engine):
    engine.stub.is_frozen = True
    engine.enter()
    request = engine.stub.simulation.running[0]
    engine.toggle(request.id)
    engine.until(lambda: engine.text(".timeline"), "the timeline")
    engine.stub.simulation = Simulation(load=0).run(1)
    engine.until(lambda: engine.headline()["Running"] == "0", "the empty engine")
    assert "Ended" in engine.row(request.id)
    assert f"Prompt of {request.prompt:,} tokens" in engine.text(".timeline")


def test_an_open_request_stays_in_sight_when_it_ends(frozen):
    request = frozen.stub.simulation.running[0]
    frozen.toggle(request.id)
    frozen.until(lambda: frozen.text(".timeline"), "the timeline")

    def end(update):
        rows = update["core"]["requests"]["rows"]
        update["core"]["requests"]["rows"] = [*rows[1:-3], [request.id, "ended", *rows[0][2:]], *rows[-3:]]
        return update

    frozen.stub.change = end
    frozen.until(lambda: "Ended" in frozen.row(request.id), "its end")
    place = """const box = (selector) => document.querySelector(selector).getBoundingClientRect();
        const [row, table] = [box("tr.request.open"), box(".scroll.tall")];
        return row.top >= table.top && row.bottom <= table.bottom"""
    assert frozen.js(place)


def test_rows_open_by_keyboard_and_keep_the_focus(engine):
    engine.enter()
    engine.js("document.querySelector('tr.request .id').focus()")
    focused = "return document.activeElement.innerText"
    name = engine.js(focused)
    engine.keys("\ue007")  # Enter
    engine.until(lambda: engine.text(".timeline"), "the timeline")
    time.sleep(0.6)  # two updates later
    assert engine.js(focused) == name
    assert engine.js("return document.activeElement.getAttribute('aria-expanded')") == "true"


def test_memory_is_a_map_of_blocks(frozen):
    pool = core_of(frozen)["kv"]["pools"][0]
    assert frozen.count(".map i") == len(pool["cells"]["owned"])
    text = frozen.part("KV memory")
    assert f"Owned {pool['owned']}" in text and f"Cached {pool['cached']}" in text and f"Free {pool['free']}" in text
    assert f"A cell is {pool['cell_blocks']} blocks, a block 16 tokens" in text
    label = frozen.js("return document.querySelector('.map').getAttribute('aria-label')").replace(THIN, " ")
    assert f"{100 * pool['owned'] / pool['blocks']:.0f} % owned by requests" in label
    full = [i for i, owned in enumerate(pool["cells"]["owned"]) if owned == pool["cell_blocks"]]
    kinds = frozen.js("return [...document.querySelectorAll('.map i')].map(i => i.className.split(' ').slice(0, 2))")
    assert full and all(kinds[i] == ["o8", "k8"] for i in full)


def test_pointing_at_a_cell_shows_its_request_and_the_other_way_round(frozen):
    core = core_of(frozen)
    pool, rows = core["kv"]["pools"][0], core["requests"]["rows"]
    idx = next(i for i, owner in enumerate(pool["cells"]["owner"]) if owner >= 0)
    owner = pool["cells"]["owner"][idx]
    cells = pool["cells"]["owner"].count(owner)
    frozen.hover(frozen.all(".map i")[idx])
    frozen.until(lambda: frozen.count(".map i.lit") == cells, "its cells")
    assert frozen.text("tr.request.lit .id") == rows[owner][0]
    assert f"mostly by {rows[owner][0]}" in frozen.text(".says")
    frozen.hover(frozen.find(".engine h1"))
    frozen.until(lambda: frozen.count(".map i.lit") == 0, "no cells")
    frozen.js(
        "[...document.querySelectorAll('tr.request .id')].find(b => b.innerText === arguments[0]).focus()",
        rows[owner][0],
    )
    frozen.until(lambda: frozen.count(".map i.lit") == cells, "its cells by keyboard")
    assert f"Request {rows[owner][0]} holds" in frozen.text(".says")


def test_the_prefix_tree_shows_hits_below_the_parts_they_follow(frozen):
    nodes = [dict(zip(NODE_COLUMNS, node, strict=True)) for node in core_of(frozen)["prefix"]["nodes"]]
    root = nodes[0]
    rate = f"{100 * root['hits'] / root['requests']:.0f} %"
    figures = [root["tokens"], root["requests"], root["hits"], root["hit_tokens"]]
    tokens, requests, hits, saved = (f"{figure:,}" for figure in figures)
    assert frozen.cells(".tree tbody tr")[0] == [f"{tokens} tokens", requests, hits, rate, saved]
    child = next(node for node in nodes if node["parent"] == root["id"] and node["requests"] > 1)
    assert f"{child['tokens']:,} tokens" in [cells[0] for cells in frozen.cells(".tree tr.d1")]
    assert "evicted" in frozen.text(".tree tr.evicted")
    assert "of all prompt tokens" in frozen.part("Prefix cache")


def test_parts_seen_once_are_one_line(frozen):
    def change(update):
        nodes = [[1, 0, 256, 90, 80, 20480, 1]] + [[i, 1, 64, 1, 0, 0, 1] for i in range(2, 150)]
        update["core"]["prefix"]["nodes"] = nodes
        return update

    frozen.stub.change = change
    frozen.says("148 parts seen once")
    assert frozen.count(".tree tbody tr") == 2


def test_startup_tells_device_kernels_and_times(frozen):
    text = frozen.part("Start-up")
    assert "Device\ncpu" in text and "Attention kernels\ncpu" in text
    assert "Weights loaded in\n900 ms" in text and "Memory, kernels, graphs in\n300 ms" in text
    assert "Graphs recorded\n1" in text


def test_restarts_and_suspects_are_told_in_words(frozen):
    assert "without a restart" in frozen.part("Restarts and suspects")

    def change(update):
        recent = [
            {"ago_s": 41.2, "cause": "own", "was_ready": True},
            {"ago_s": 95, "cause": "outside", "was_ready": False},
        ]
        update["server"]["restarts"] = {"count": 2, "recent": recent}
        update["server"]["suspects"] = {"groups": [2, 1], "convicted": 1}
        return update

    frozen.stub.change = change
    frozen.says("replaced 2 times")
    text = frozen.part("Restarts and suspects")
    assert "It crashed" in text and "41 s ago" in text and "It was killed from outside while it started" in text
    assert "2 requests on trial for making it crash, 1 more wait" in text and "is refused now" in text


def test_speculation_is_there_only_where_tokens_are_guessed(frozen):
    assert not frozen.part("Speculation")

    def change(update):
        update["core"]["speculation"] = {
            "method": "ngram", "drafts": 310, "draft_tokens": 1240, "accepted": 610, "acceptance": 0.492,
            "recent_acceptance": 0.51, "by_place": [250, 180, 110, 70],
        }  # fmt: skip
        return update

    frozen.stub.change = change
    frozen.says("guessed by ngram were right")
    text = frozen.part("Speculation")
    assert "49 % of 1,240 tokens" in text and "51 % in the last seconds" in text
    assert [cells[1] for cells in frozen.cells(".places tbody tr")] == ["81 %", "58 %", "35 %", "23 %"]


def test_pause_holds_the_figures_still(engine):
    engine.enter()
    engine.click("Pause")
    before = engine.text(".progress")
    time.sleep(0.8)
    assert engine.text(".progress") == before
    assert "Paused" in engine.text(".engine-head")
    engine.click("Go on")
    engine.until(lambda: engine.text(".progress") != before, "new figures")


# ---- how the connection stands ----


def test_an_idle_engine_says_what_to_do(engine):
    engine.stub.simulation = Simulation(load=0).run(1)
    engine.enter()
    assert "No requests. Send a message in the chat" in engine.part("Requests")
    assert "No prompt was looked up yet" in engine.part("Prefix cache")


def test_the_operators_key_is_asked_for_and_goes_in_a_header(engine):
    engine.stub.key = "operator-key-1"
    engine.enter(".state.key")
    assert "The operator's key is needed" in engine.text(".state")
    engine.click("Enter the key")
    engine.type("dialog input", "wrong")
    before = len(engine.stub.paths)
    engine.click("Use this key")
    engine.until(lambda: len(engine.stub.paths) > before, "a request with the wrong key")
    engine.until(lambda: "The operator's key is needed" in engine.text(".state"), "the question again")
    engine.click("Enter the key")
    engine.type("dialog input", "operator-key-1")
    engine.click("Use this key")
    engine.until(lambda: engine.text(".headline"), "the figures")
    assert not [path for path in engine.stub.paths if "operator-key" in path]
    assert "operator-key" not in engine.driver.current_url


def test_without_an_operators_key_the_flag_is_named(engine):
    engine.stub.refuse = 403
    engine.enter(".state.forbidden")
    assert "--admin-api-key" in engine.text(".state")
    calls = engine.stub.paths.count("/v1/engine/live")
    time.sleep(1.5)
    assert engine.stub.paths.count("/v1/engine/live") == calls, "it asks on, though nothing can change"


def test_a_server_without_the_endpoint_is_told_and_not_asked_on(engine):
    engine.stub.refuse = 404
    engine.enter(".state.missing")
    assert "This server has no engine view" in engine.text(".state")
    calls = engine.stub.paths.count("/v1/engine/live")
    time.sleep(1.5)
    assert engine.stub.paths.count("/v1/engine/live") == calls, "it asks on, though nothing can change"
    engine.stub.refuse = 0
    engine.click("Try now")
    engine.until(lambda: engine.text(".headline"), "the figures")


def test_a_server_that_fails_to_answer_is_told_and_asked_again(engine):
    engine.stub.refuse = 500
    engine.enter(".state.failed")
    assert "The server could not answer" in engine.text(".state")
    engine.says("Trying again in 5 s.")
    engine.says("Trying again in 4 s.")
    engine.stub.refuse = 0
    engine.until(lambda: engine.text(".headline"), "the figures")
    assert not engine.text(".state")


def test_too_many_watchers_waits_for_a_place(engine):
    engine.stub.refuse = 503
    engine.enter(".state.full")
    assert "Too many are watching" in engine.text(".state")
    engine.says("Trying again in 1 s.")
    engine.stub.refuse = 0
    engine.until(lambda: engine.text(".headline"), "the figures")


def test_a_lost_connection_keeps_the_figures_and_comes_back(engine):
    engine.enter()
    engine.stub.refuse = 502
    engine.stub.drop()
    engine.says("The connection was lost. These are the last figures.")
    assert engine.text(".headline") and engine.count(".engine.stale") == 1
    engine.stub.refuse = 0
    engine.click("Try now")
    engine.until(lambda: not engine.text(".engine .banner"), "the stream")
    assert "Live" in engine.text(".engine-head") and engine.count(".engine.stale") == 0


def test_an_engine_that_starts_and_one_that_is_replaced(engine):
    def without_core(update):
        return {**update, "core": None, "core_age_s": None, "server": {**update["server"], "state": "starting"}}

    engine.stub.change = without_core
    engine.enter(".state.no-core")
    assert "The engine is starting" in engine.text(".state")
    engine.stub.change = lambda update: update
    engine.until(lambda: engine.text(".headline"), "the figures")
    engine.stub.change = without_core
    engine.says("The engine is being replaced")
    assert engine.text(".headline")
    engine.stub.change = lambda update: update
    engine.until(lambda: not engine.text(".engine .banner"), "the new engine")


@pytest.mark.parametrize(
    ("state", "said"), [("asleep", "is asleep"), ("paused", "is paused"), ("silent", "no sign of life")]
)
def test_states_of_the_engine_are_told(frozen, state, said):
    frozen.stub.change = lambda update: {**update, "server": {**update["server"], "state": state}}
    frozen.says(said, ".engine .banner")


def test_a_long_step_is_told(frozen):
    frozen.stub.change = lambda update: {**update, "core_age_s": 7.4}
    frozen.says("The engine has been busy with one step for 7 seconds.")


def test_leaving_the_view_gives_the_place_back(engine):
    engine.enter()
    assert engine.stub.num_streams == 1
    engine.js("location.hash = '#chat'")
    engine.until(lambda: engine.stub.num_streams == 0, "the end of the stream")
    assert engine.count(".engine") == 0
    engine.js("location.hash = '#engine'")
    engine.until(lambda: engine.text(".headline"), "the figures")
    assert engine.stub.num_streams == 1


@contextlib.contextmanager
def hastened(page: EnginePage, from_ms: int) -> Iterator[EnginePage]:
    """The view where the page's waits of `from_ms` and more take a tenth of their time."""
    wait = "then, ms >= FROM ? ms / 10 : ms, ...rest".replace("FROM", str(from_ms))
    script = f"{{ const real = setTimeout; window.setTimeout = (then, ms, ...rest) => real({wait}); }}"
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        yield page.enter()
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        page.driver.refresh()  # with time as it is


@contextlib.contextmanager
def hidden(page: EnginePage) -> Iterator[None]:
    """Another tab is in front."""
    own = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    try:
        yield
    finally:
        page.driver.close()
        page.driver.switch_to.window(own)


def test_a_tab_that_is_hidden_for_half_a_minute_gives_its_place_back(engine):
    stub = engine.stub
    with hastened(engine, from_ms=20_000):
        with hidden(engine):
            time.sleep(1)  # ten seconds
        assert stub.num_streams == 1
        with hidden(engine):
            since = time.monotonic()
            engine.until(lambda: stub.num_streams == 0, "the end of the stream", 15)
            assert time.monotonic() - since > 2.5, "it left too soon"
            calls = stub.paths.count("/v1/engine/live")
            time.sleep(1.5)
            assert stub.paths.count("/v1/engine/live") == calls, "it came back, though nobody looks"
        engine.until(lambda: stub.num_streams == 1, "the stream, once somebody looks again")
        engine.after_updates(2)
        assert "Live" in engine.text(".engine-head")


def test_a_stream_that_says_nothing_for_eight_seconds_is_opened_anew(engine):
    with hastened(engine, from_ms=8_000):
        engine.stub.is_silent = True
        since = time.monotonic()
        engine.says("The connection was lost. These are the last figures.")
        assert time.monotonic() - since > 0.5, "it was given up too soon"
        engine.stub.is_silent = False
        engine.until(lambda: not engine.text(".engine .banner"), "the stream")
        assert "Live" in engine.text(".engine-head")


# ---- several engines ----


def test_one_of_several_engines_can_be_chosen(engine):
    def several(update: dict[str, Any]) -> dict[str, Any]:
        return {**update, "server": {**update["server"], "engines": 3}}

    engine.stub.change = several
    engine.enter()
    engine.until(lambda: "Engine 0 of 3" in engine.text(".which"), "the choice")
    engine.stub.paths.clear()
    engine.js(
        "const which = document.querySelector('.which'); which.value = '2'; which.dispatchEvent(new Event('change'))"
    )
    engine.until(lambda: "/v1/engine/live?engine=2" in engine.stub.paths, "the other engine")
    engine.until(lambda: engine.text(".headline"), "its figures")
    assert engine.js("return document.querySelector('.which').value") == "2"
    # The server learns of it with the next update it sends.
    engine.until(lambda: engine.stub.num_streams == 1, "the first engine's stream to end")


def test_one_engine_needs_no_choice(frozen):
    assert not frozen.text(".which") and "Live" in frozen.text(".engine-head")


# ---- sizes ----


@pytest.mark.parametrize("width", [320, 390, 820, 1440])
def test_nothing_is_wider_than_the_window(frozen, width):
    frozen.resize(width, 844)
    frozen.toggle(frozen.stub.simulation.running[0].id)
    frozen.until(lambda: frozen.text(".timeline"), "the timeline")
    assert frozen.js("return document.querySelector('#engine').scrollWidth") <= width
    cut = frozen.js(
        "return [...document.querySelectorAll('.engine .scroll')].filter(s => s.scrollWidth > s.clientWidth + 1).length"
    )
    assert cut == 0, "a table does not fit"


# ---- for everybody ----


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(frozen, axe, theme):
    frozen.theme(theme)
    frozen.toggle(frozen.stub.simulation.running[0].id)
    frozen.until(lambda: frozen.text(".timeline"), "the timeline")
    assert frozen.accessibility(axe) == []


def test_accessibility_at_phone_width(frozen, axe):
    frozen.resize(390, 844)
    assert frozen.accessibility(axe) == []


def test_accessibility_of_other_states(engine, axe):
    engine.stub.refuse = 401
    engine.enter(".state.key")
    assert engine.accessibility(axe) == []
    engine.stub.refuse = 0
    engine.enter()
    engine.stub.refuse = 502
    engine.stub.drop()
    engine.says("The connection was lost.")
    assert engine.accessibility(axe) == []


# ---- what no engine would say ----

HUGE = 1e308
VALUES = (HUGE, -HUGE, -1, 0, 1e-300, None, True, [], {})
SCRIPT = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script>"


def _everything(value: Any, instead: Any) -> Any:
    """The same shape with another value in each place."""
    if isinstance(value, dict):
        return {name: _everything(part, instead) for name, part in value.items()}
    if isinstance(value, list):
        return [_everything(part, instead) for part in value]
    return instead


def hostile_updates(update: dict[str, Any]) -> list[Any]:
    core, columns = update["core"], update["core"]["requests"]["columns"]
    chain = [[i, i - 1, 1, 5, 5, 5, 1] for i in range(1, 5000)]
    cells = {"owned": [9] * 9999, "owner": [1e9, -7]}
    loops = [[1, 1, 5, 5, 5, 5, 1], [2, 3, 5, 5, 5, 5, 1], [3, 2, 5, 5, 5, 5, 1], [3, 2, 5, 5, 5, 5, 1]]
    rows = [
        [SCRIPT * 20, "decode", HUGE, -HUGE, HUGE, HUGE, 0, HUGE, HUGE, -HUGE, [["decode", -HUGE, HUGE, HUGE]] * 50]
    ] * 100
    return [
        *(_everything(update, value) for value in (*VALUES, SCRIPT, "\u202eevil" * 20)),
        None, 7, "text", [], {}, {"core": {}}, {"server": {}, "core": {"requests": {"columns": columns, "rows": rows}}},
        {**update, "core": {**core, "requests": {"columns": [], "rows": rows}}},
        {**update, "core": {**core, "requests": {**core["requests"], "columns": columns[::-1]}}},
        {**update, "core": {**core, "prefix": {"columns": NODE_COLUMNS, "nodes": chain}}},
        {**update, "core": {**core, "prefix": {"columns": NODE_COLUMNS, "nodes": loops}}},
        {**update, "core": {**core, "kv": {"pools": [{"blocks": 5, "cell_blocks": 0, "cells": cells}] * 99}}},
        {**update, "core": {**core, "steps": {"decode": [HUGE] * 9999}, "history": {"interval_s": 0, "decode": [1]}}},
        *({name: value for name, value in update.items() if name != left} for left in update),
        *({**update, "core": {name: value for name, value in core.items() if name != left}} for left in core),
    ]  # fmt: skip


def test_absurd_updates_neither_break_the_page_nor_run(frozen):
    frozen.console()  # what came before
    num_paths = len(frozen.stub.paths)
    frozen.toggle(frozen.stub.simulation.running[0].id)
    updates = hostile_updates(update_of(frozen))
    frozen.js("""window.seen = []; window.addEventListener('error', (e) => seen.push(e.message));
        window.addEventListener('unhandledrejection', (e) => seen.push(String(e.reason)));""")
    events = [b"data: " + json.dumps(update).encode() + b"\n\n" for update in updates]
    frozen.stub.once = [b"not json\n\ndata: {\n\n: a comment\n\n" + b"".join(events)]
    frozen.until(lambda: not frozen.stub.once, "the next update")
    frozen.until(lambda: frozen.headline().get("Running") == str(len(frozen.stub.simulation.running)), "sane figures")
    assert frozen.js("return [window.seen, window.hacked ?? null]") == [[], None]
    assert frozen.console() == []
    assert "/v1/engine/live" not in frozen.stub.paths[num_paths:], "the page had to connect again"


def test_an_event_without_an_end_is_given_up(frozen):
    frozen.stub.paths.clear()
    frozen.stub.once = [b"data: " + b"x" * 3_000_000]
    frozen.until(lambda: "/v1/engine/live" in frozen.stub.paths, "another connection")
    frozen.until(lambda: "Live" in frozen.text(".engine-head"), "the stream")


def test_each_absurd_update_leaves_a_page_that_fits(frozen):
    frozen.resize(390, 844)
    for update in hostile_updates(update_of(frozen))[:11]:
        frozen.stub.raw = json.dumps(update).encode()
        frozen.stub.once = [b"data: " + frozen.stub.raw + b"\n\n"] * 2
        frozen.until(lambda: not frozen.stub.once, "the update")
        assert frozen.js("return document.querySelector('#engine').scrollWidth") <= 390
        assert frozen.js("return document.querySelector('.engine').offsetHeight") < 20000
    assert frozen.js("return window.hacked ?? null") is None


def test_there_are_no_errors_in_the_console(engine):
    engine.console()
    engine.enter()
    engine.toggle(engine.stub.simulation.running[0].id)
    time.sleep(1)
    assert engine.console() == []
