"""A real Chromium, driven by Selenium, in front of the page: as the real server serves it, or a stub (stub.py).

Where there is no browser these tests are skipped, and the reason says how to get one.
"""

import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serving import ServerProcess
from tests.ui import stub as stub_server
from tests.ui.stub import Stub
from tests.wheel import build, install

NO_BROWSER = "they need a browser: apt-get install chromium chromium-driver"
WAIT_S = 20.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They share a browser, also where tests are spread over processes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("ui"))


class Page:
    """The page as a person uses it: what it shows, buttons by their labels."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, hash: str = "") -> "Page":
        self.driver.get(f"{self.url}/{hash}")
        if hash:
            self.driver.refresh()  # an address that differs in its hash alone is no new page
        self.until(lambda: self.js("return !!document.querySelector('#message')"), "the page")
        return self

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], what: str = "the condition", timeout_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come: the page says\n{self.text()[-3000:]}")
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')", selector
        )

    def find(self, selector: str) -> Any:
        return self.until(lambda: self.all(selector), selector)[-1]

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def count(self, selector: str) -> int:
        return self.js("return document.querySelectorAll(arguments[0]).length", selector)

    def click(self, label: str, within: str = "body") -> None:
        """The last button with that label or text that is shown."""
        script = """
            const [label, within] = arguments;
            const isIt = (b) => b.getAttribute('aria-label') === label || b.innerText.trim() === label;
            const canBe = (b) => b.checkVisibility() && !b.disabled && isIt(b);
            const button = [...document.querySelectorAll(within + ' button')].filter(canBe).at(-1);
            button?.scrollIntoView({block: 'nearest'});
            button?.click();
            return Boolean(button)"""
        self.until(lambda: self.js(script, label, within), f"the button {label!r}")

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def set(self, name: str, value: str) -> None:
        """A parameter, in the panel."""
        if self.js("return document.querySelector('#panel').hidden"):
            self.click("Parameters")
        self.js("document.querySelectorAll('#panel details').forEach(d => { d.open = true })")
        field = self.find(f"#param-{name}")
        self.js(
            "const [f, v] = arguments; f.value = v;"
            "f.dispatchEvent(new Event(f.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true}))",
            field,
            value,
        )

    def say(self, text: str, wait: bool = True) -> None:
        box = self.find("#message")
        box.send_keys(text)
        box.send_keys(Keys.ENTER)
        if wait:
            self.until_idle()

    def until_idle(self, timeout_s: float = 60.0) -> None:
        time.sleep(0.05)
        idle = "return document.querySelector('.send').getAttribute('aria-label') === 'Send'"
        self.until(lambda: self.js(idle), "the end of the answer", timeout_s)
        self.drawn()

    def drawn(self) -> None:
        """Two frames later."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def answer(self) -> str:
        """The text of the last answer."""
        return self.js("return [...document.querySelectorAll('.assistant .text')].at(-1)?.innerText ?? ''").strip()

    def keys(self, *keys: str) -> None:
        actions = ActionChains(self.driver)
        for key in keys[:-1]:
            actions.key_down(key)
        actions.send_keys(keys[-1])
        for key in keys[:-1]:
            actions.key_up(key)
        actions.perform()

    def hover(self, element: Any) -> None:
        ActionChains(self.driver).move_to_element(element).perform()

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def theme(self, name: str) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def heap_bytes(self) -> int:
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "JSHeapUsedSize")

    def accessibility(self, axe: str) -> list[str]:
        """What axe-core finds serious or critical, with where it is."""
        self.js(axe + "; window.axe = window.axe ?? axe")
        run = """
            const done = arguments[0];
            const where = (n) => n.html.slice(0, 200) + ' ' + n.failureSummary;
            const told = (v) => v.id + ': ' + v.nodes.map(where).join(' | ');
            const look = ({passes, violations}) => passes.length < 10 ? ['nothing was checked']
                : violations.filter(v => ['serious', 'critical'].includes(v.impact)).map(told);
            axe.run(document).then(found => done(look(found)), error => done(['axe failed: ' + error]))"""
        return self.driver.execute_async_script(run)

    def console(self) -> list[str]:
        """What went wrong, as the browser's console has it; answers with an error status are counted there, too."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def chromium(folder: Path, width: int = 1280, height: int = 860) -> Any:
    """Of Debian's packages: Selenium would fetch another one."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip(NO_BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-lcd-text",
    ]
    for flag in (*flags, f"--window-size={width},{height}", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


@pytest.fixture(scope="session")
def downloads(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def browser(downloads) -> Iterator[Any]:
    driver = chromium(downloads)
    driver.execute_cdp_cmd("Performance.enable", {})
    yield driver
    driver.quit()


def fresh(driver: Any, url: str) -> Page:
    """The page for someone who was never there."""
    page = Page(driver, url)
    page.resize(1280, 860)
    page.theme("light")
    driver.get(url + "/ui/theme.js")  # of the same origin, and nothing runs there
    driver.execute_async_script(
        "localStorage.clear(); sessionStorage.clear(); const request = indexedDB.deleteDatabase('quire');"
        "request.onsuccess = request.onerror = request.onblocked = () => arguments[0]()"
    )
    driver.get_log("browser")
    return page.open()


@pytest.fixture(scope="session")
def axe(request, tmp_path_factory) -> str:
    """axe-core, a checker of accessibility, from npm: too large to be kept here, so it is fetched once and cached."""
    kept = request.config.cache.mkdir("axe-core") / "axe.min.js"
    if not kept.exists():
        folder = tmp_path_factory.mktemp("axe")
        try:
            subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("accessibility is not tested: it needs npm, and axe-core from its registry")
        with tarfile.open(next(folder.glob("axe-core-*.tgz"))) as archive:
            member = archive.extractfile("package/axe.min.js")
            kept.write_bytes(member.read())
    return kept.read_text()


@pytest.fixture(scope="session")
def stub_url() -> Iterator[tuple[str, Stub]]:
    with stub_server.serving() as found:
        yield found


@pytest.fixture
def stub(stub_url) -> Stub:
    stub = stub_url[1]
    stub.__init__()
    return stub


@pytest.fixture
def page(browser, stub_url, stub) -> Page:
    """In front of the stub."""
    return fresh(browser, stub_url[0])


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> dict[str, str]:
    """The environment in which the package is the one of a wheel, with the page's files that are in it."""
    folder = tmp_path_factory.mktemp("wheel")
    install(build(folder), folder / "site")
    return {"PYTHONPATH": str(folder / "site")}


@pytest.fixture(scope="session")
def server(smollm2, installed) -> Iterator[ServerProcess]:
    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "256M", "--no-access-log"]
    with ServerProcess("smollm2", *flags, environment=installed) as server:
        yield server


@pytest.fixture
def real(browser, server) -> Page:
    """In front of the real server."""
    return fresh(browser, server.url)
