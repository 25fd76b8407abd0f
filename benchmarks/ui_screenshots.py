"""Makes the screenshots of docs/ui.md: the page in front of `quire serve smollm2`, in Chromium, into docs/images.

    python -m benchmarks.ui_screenshots [--folder docs/images]

Needs Chromium and its driver (apt-get install chromium chromium-driver), and looks best with a proportional font
(fonts-roboto). What it shows is what the model says: nothing is staged but the questions.
"""

import argparse
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ui.conftest import Page, chromium, fresh

from benchmarks.server_process import QUIRE, ServerProcess

MAX_BYTES = 150_000
QUESTIONS = ["What is the capital of France?", "Write a Python function that reverses a string, with an example."]
SYSTEM = "You are a patient librarian who knows every book in the building, and likes to explain where they stand. "
FONT = """<match target="pattern"><test name="family" qual="any"><string>%s</string></test>
<edit name="family" mode="prepend" binding="strong"><string>Roboto</string></edit></match>"""
FONTS = f"""<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<include ignore_missing="yes">/etc/fonts/fonts.conf</include>{FONT % "system-ui"}{FONT % "sans"}{FONT % "sans-serif"}
</fontconfig>"""


def body(number: int) -> bytes:
    prompt = SYSTEM * (4 + number % 3 * 8) + f"A reader asks for book {number}. You say:"
    return b'{"model": "smollm2", "prompt": "%s", "max_tokens": 120, "ignore_eos": true}' % prompt.encode()


@contextmanager
def load(url: str, num_clients: int = 6) -> Iterator[None]:
    """Clients that ask on and on, with prompts that begin alike."""
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            request = urllib.request.Request(
                f"{url}/v1/completions", body(number), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
            number += num_clients

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join(120)


def save(page: Page, path: Path) -> None:
    page.drawn()
    time.sleep(0.3)
    page.driver.save_screenshot(str(path))
    print(f"{path} {path.stat().st_size:,} bytes")
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} is larger than {MAX_BYTES:,} bytes: show less")


def chat(page: Page, folder: Path) -> None:
    page.set("temperature", "0")
    page.set("max_tokens", "220")
    page.click("Close parameters")
    for question in QUESTIONS:
        page.say(question)
    page.js("document.activeElement.blur()")
    save(page, folder / "ui-chat-light.png")
    page.theme("dark")
    page.click("Compare two panes")
    page.click("Pane B")
    page.set("temperature", "0.9")
    page.set("top_p", "0.8")
    page.set("seed", "3")
    page.set("max_tokens", "80")
    page.js("document.querySelectorAll('#panel details').forEach((d, idx) => { d.open = idx === 0 })")
    page.js("document.querySelector('.panel-body').scrollTop = 0")
    page.say("Write two lines about the sea.")
    save(page, folder / "ui-compare-dark.png")


def tokens(page: Page, folder: Path) -> None:
    page.set("temperature", "0.8")
    page.set("seed", "7")
    page.set("top_logprobs", "5")
    page.set("max_tokens", "48")
    page.click("Close parameters")
    page.say("What should I see in Rome?")
    page.click("Tokens and alternatives")
    page.hover(page.all(".token")[9])
    save(page, folder / "ui-tokens.png")


def phone(page: Page, folder: Path) -> None:
    page.resize(390, 780)
    page.set("temperature", "0")
    page.set("max_tokens", "90")
    page.click("Close parameters")
    page.say(QUESTIONS[1])
    page.js("document.activeElement.blur()")
    save(page, folder / "ui-phone.png")


def engine(page: Page, folder: Path) -> None:
    page.resize(1280, 1000)
    with load(page.url):
        page.open("#engine")
        time.sleep(40)
        save(page, folder / "ui-engine.png")
        page.theme("dark")
        part = "[...document.querySelectorAll('.part h2')].find(title => title.innerText === 'KV memory')"
        page.js(f"{part}.scrollIntoView()")
        save(page, folder / "ui-engine-dark.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        fonts = Path(temporary) / "fonts.conf"
        fonts.write_text(FONTS)
        os.environ["FONTCONFIG_FILE"] = str(fonts)
        driver = chromium(Path(temporary))
        driver.execute_cdp_cmd("Performance.enable", {})
        try:
            with ServerProcess(
                [*QUIRE, "smollm2", "--max-model-len", "2048", "--kv-cache-memory-bytes", "192M"], "/ready"
            ) as server:
                for pictures in (chat, tokens, phone, engine):
                    pictures(fresh(driver, server.url), folder)
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
