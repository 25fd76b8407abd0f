"""Finds stop strings in text that arrives in pieces, and holds back what may still become one.

One `StopStream` per choice, fed with the detokenizer's deltas by the frontend; the strings are compiled once per
request. Must not know tokens beyond their number. The time per character depends on neither the number nor the length
of the strings.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The strings as an Aho-Corasick automaton: its state is the longest end of the text that begins a string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]  # state -> character -> state
        self.depth = [0]  # characters of the string begun
        self.found: list[str | None] = [None]  # the longest string that ends in this state
        for string in strings:
            self._add(string)
        self.fallback = [0] * len(self.next)  # the next shorter end that begins a string
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self.next[state].get(char)
            if following is None:
                following = self.next[state][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        if state:
            self.found[state] = string

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                queue.append(following)
                self.fallback[following] = self.step(self.fallback[state], char)
            if self.found[state] is None:
                self.found[state] = self.found[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        while (following := self.next[state].get(char)) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return following


class StopStream:
    """Text in, text out, up to the first stop string.

    The first is the one complete first, the longest of those complete at the same character: so the result does not
    depend on how the text was cut into tokens. `matched` is that string once there is one; no text follows it.
    """

    def __init__(
        self, strings: StopStrings | Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._strings = strings if isinstance(strings, StopStrings) else StopStrings(strings)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, num_tokens: int | None = None) -> str:
        """The text that can be shown.

        `num_tokens` counts the output tokens so far, those of `text` included: a string complete within the first
        `min_tokens` of them does not stop anything.
        """
        if self.matched is not None:
            return ""
        strings = self._strings
        if len(strings.next) == 1:
            return text
        may_stop = num_tokens is None or num_tokens > self._min_tokens
        state = self._state
        step, found = strings.step, strings.found
        for idx, char in enumerate(text):
            state = step(state, char)
            if may_stop and (string := found[state]) is not None:
                return self._stop(self._held + text[: idx + 1], string)
        self._state = state
        text = self._held + text
        num_shown = len(text) - strings.depth[state]
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """What was held back, at the end of a text that did not stop."""
        text, self._held = self._held, ""
        return text

    def _stop(self, text: str, string: str) -> str:
        self.matched = string
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(string)]
