"""Thinking between <think> and </think>: DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, MiniMax M2, OLMo 3 and relatives.

Chosen by `reasoning.choose`, used by the server, and the parser of the formats beside it that only have other marks.
Thinking opens with the answer or not at all, so that an answer may speak of the tags: an opening tag further on is
content, and so is a closing tag where nothing was opened.
"""

from quire.frontend.parse import Steps, StreamParser, Trimmed
from quire.frontend.stop import StopStrings

MODEL_TYPES = ("qwen3", "qwen3_moe")
TEMPLATE_MARKS = ("<think>", "</think>")
NEEDS_SPECIAL_TOKENS = True  # some models have the tags as special tokens
START, END = "<think>", "</think>"


class Parser(StreamParser):
    """`starts_open`: the prompt has opened the thinking. White space around thinking is dropped."""

    MARKS: tuple[tuple[str, str], ...] = ((START, END),)  # each opening mark with its closing one
    ALSO_ENDS: tuple[str, ...] = ()  # what the answer may begin with where thinking was not closed
    ANSWER: tuple[str, str] | None = None  # marks around the answer, which are dropped

    def __init__(self, starts_open: bool) -> None:
        self._starts_open = starts_open
        super().__init__()

    def run(self) -> Steps[None]:
        end = yield from self._opened()
        if end:
            if (yield from self.until(StopStrings((end, *self.ALSO_ENDS)), Trimmed(self.reasoning))) == end:
                self.read(len(end))
            yield from self.space()
        yield from self.answer(bool(end))

    def _opened(self) -> Steps[str]:
        """What closes the thinking; "" if there is none."""
        space: list[str] = []
        yield from self.space(space.append)
        start = yield from self.one_of(*(start for start, _ in self.MARKS))
        if start:
            return dict(self.MARKS)[start]
        if self._starts_open:
            return self.MARKS[0][1]
        self.content("".join(space))
        return ""

    def answer(self, has_thought: bool) -> Steps[None]:
        if self.ANSWER is not None and has_thought and (yield from self.one_of(self.ANSWER[0])):
            end = self.ANSWER[1]
            if (yield from self.until(StopStrings((end,)), Trimmed(self.content))):
                self.read(len(end))
                yield from self.space()
        yield from self.rest(self.content)
