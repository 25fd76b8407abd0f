"""DeepSeek V3 and R1: calls between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>, each with its own marks.

Chosen by `tools.choose`, used by the server. V3 and R1 write `function`, the separator, the name and the arguments in a
fenced block; V3.1 (deepseek_v31) the name, the separator and the arguments, which is read here as well.
"""

from quire.frontend.parse import Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base

MODEL_TYPES = ("deepseek_v3",)
TEMPLATE_MARKS = ("<｜tool▁calls▁begin｜>",)
NEEDS_SPECIAL_TOKENS = True

_BEGIN = "<｜tool▁calls▁begin｜>"
_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_MARKS = StopStrings((_BEGIN, _CALL))  # a model may leave out the outer mark


class Parser(base.ToolParser):
    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._calls_between())

    def _calls_between(self) -> Steps[None]:
        yield from self.one_of(_BEGIN)
        yield from self.space()
        yield from self.expect(_CALL)
        while True:
            yield from self._call()
            yield from self.space()
            if not (yield from self.one_of(_CALL)):
                break
        yield from self.one_of(_END)

    def _call(self) -> Steps[None]:
        name = yield from self.expect(*self.tools, "function")
        yield from self.expect(_SEPARATOR)
        is_fenced = name not in self.tools or (yield from self.peek()) not in ("{", " ", "\n")
        if is_fenced:
            name = yield from self.name()
            yield from self.expect("\n```json\n")
        yield from self.arguments_object(name)
        yield from self.space()
        if is_fenced:
            yield from self.one_of("```")
        yield from self.expect(_CALL_END)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """Both ways of writing; a model keeps to its own."""

    def fenced_begin(name: str) -> str:
        return f"{_CALL}function{_SEPARATOR}{name}\n```json\n"

    fenced = base.separated(list(base.tags(tools, fenced_begin, f"\n```{_CALL_END}")), "\n", parallel=parallel)
    return block({"type": "or", "elements": [fenced, plain_calls(tools, parallel)]}, required)


def plain_calls(tools: list[base.Tool], parallel: bool) -> base.Format:
    """Without fences."""
    calls = list(base.tags(tools, lambda name: f"{_CALL}{name}{_SEPARATOR}", _CALL_END))
    return base.separated(calls, "", parallel=parallel)


def block(calls: base.Format, required: bool) -> base.Format:
    marked = {"type": "tag", "begin": _BEGIN, "content": calls, "end": _END}
    return marked if required else base.triggered([_BEGIN], [marked], parallel=False)
