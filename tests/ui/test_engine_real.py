"""The engine view in front of the real server, on SmolLM2 under load: what is shown is what it does."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.serving import ServerProcess
from tests.ui.conftest import fresh
from tests.ui.engine_page import EnginePage

FEW_BLOCKS = ["--max-model-len", "512", "--num-gpu-blocks-override", "40", "--no-access-log"]
PREFIX = "You are a patient librarian who knows every book. " * 20


@contextlib.contextmanager
def asking(url: str, max_tokens: int = 40) -> Iterator[None]:
    """Four clients that ask on and on, with prompts that begin alike."""
    stop = threading.Event()

    def ask(number: int) -> None:
        body = {"model": "smollm2", "max_tokens": max_tokens, "ignore_eos": True, "prompt": f"{PREFIX}{number}"}
        while not stop.is_set():
            try:
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            except httpx.HTTPError:
                stop.wait(0.1)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join(60)


@pytest.fixture
def load(server) -> Iterator[None]:
    with asking(server.url):
        yield


@pytest.fixture
def engine(browser, server) -> EnginePage:
    fresh(browser, server.url).console()
    return EnginePage(browser, server.url).enter()


def figure(page: EnginePage, name: str) -> float:
    digits = page.headline()[name].split(" ")[0].replace(",", "")
    return float(digits) if digits != "–" else 0.0


def test_a_busy_engine_is_shown_as_it_works(engine, load):
    for name in ("Running", "Answer tokens/s", "Step", "KV in use", "First token", "Prefix hits"):
        engine.until(lambda name=name: figure(engine, name) > 0, name, 60)
    engine.until(lambda: "Ended" in engine.text(".group-row"), "requests that ended", 60)
    engine.until(lambda: int(engine.cells(".tree tbody tr")[0][2]) > 0, "hits in the tree", 60)
    engine.until(lambda: engine.count(".map i:not(.o0)") > 0, "blocks of requests")
    engine.toggle(engine.cells("tr.request")[0][0])
    text = engine.until(lambda: engine.text(".timeline"), "a timeline")
    assert "Prompt of" in text and "Waited" in text
    assert engine.console() == []


def test_an_engine_that_was_killed_is_told(engine, load, server: ServerProcess):
    engine.until(lambda: figure(engine, "Running") > 0, "requests that run", 60)
    os.kill(server.core_pid(), signal.SIGKILL)
    engine.until(lambda: "It was killed from outside" in engine.text(".restarts"), "the restart", 60)
    engine.until(lambda: not engine.text(".engine .banner") and figure(engine, "Running") > 0, "the new engine", 60)


def test_how_the_engine_was_set_up_is_told(engine):
    setup = engine.text(".setup")
    assert "Device\ncpu" in setup
    assert "Weights loaded in" in setup and "Graphs recorded\n1" in setup


def test_preempted_requests_are_told(browser, smollm2):
    with ServerProcess("smollm2", *FEW_BLOCKS) as small, asking(small.url, max_tokens=200):
        fresh(browser, small.url)
        engine = EnginePage(browser, small.url).enter()
        engine.until(lambda: figure(engine, "Preemptions") > 0, "a preemption", 60)
        preempted = engine.until(lambda: [row for row in engine.cells("tr.request") if row[6] != "0"], "its row", 60)
        engine.toggle(preempted[0][0])
        engine.until(lambda: "reempted" in engine.text(".timeline"), "its timeline", 60)
