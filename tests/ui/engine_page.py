"""The engine view as a person sees it: figures by name, sections by title, rows of tables. For its tests."""

from tests.ui.conftest import Page
from tests.ui.engine_stub import EngineStub

THIN = "\u202f"  # between a number and its unit


class EnginePage(Page):
    stub: EngineStub  # where it is in front of one

    def enter(self, wait: str = ".engine .headline") -> "EnginePage":
        self.open("#engine")
        self.until(lambda: self.js("return document.querySelector(arguments[0])?.checkVisibility()", wait), wait)
        return self

    def after_updates(self, number: int) -> None:
        """When the stub has sent so many more."""
        goal = self.stub.num_sent + number
        self.until(lambda: self.stub.num_sent >= goal, "updates")

    def text(self, selector: str = "body") -> str:
        """What is seen; innerText would also tell what is hidden."""
        find = (
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.innerText)"
        )
        return "\n".join(self.js(find, selector)).replace(THIN, " ")

    def says(self, text: str, selector: str = ".engine") -> None:
        self.until(lambda: text in self.text(selector), repr(text), 15)

    def cells(self, selector: str) -> list[list[str]]:
        """The cells of rows that are seen."""
        find = """return [...document.querySelectorAll(arguments[0])].filter(r => r.checkVisibility()).map(
            r => [...r.cells].map(c => c.innerText.replaceAll("\u202f", " ").replace(/^Level .*:\\s/, "").trim()))"""
        return self.js(find, selector)

    def headline(self) -> dict[str, str]:
        find = """return [...document.querySelectorAll(".headline > div")].map(
            d => [d.querySelector("dt").innerText, d.querySelector(".big").innerText])"""
        return {name: value.replace(THIN, " ") for name, value in self.js(find)}

    def part(self, title: str) -> str:
        """The text of a section; empty if it is not there."""
        find = """const parts = [...document.querySelectorAll(".part")];
            const part = parts.find(p => p.querySelector("h2").innerText === arguments[0]);
            return part?.checkVisibility() ? part.innerText : "";"""
        return self.js(find, title).replace(THIN, " ")

    def chart(self, title: str) -> str:
        """What a screen reader is told of a chart."""
        label = "return document.querySelector(arguments[0])?.getAttribute('aria-label') ?? ''"
        return self.until(lambda: self.js(label, f'svg.plot[aria-label^="{title},"]'), title).replace(THIN, " ")

    def row(self, request_id: str) -> list[str]:
        return next((cells for cells in self.cells("tr.request") if cells[0] == request_id), [])

    def toggle(self, request_id: str) -> None:
        find = "return [...document.querySelectorAll('tr.request .id')].find(b => b.innerText === arguments[0])"
        self.js("arguments[0].click()", self.until(lambda: self.js(find, request_id), request_id))
