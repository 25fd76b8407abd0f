"""Pythonic calls: [name(key=value, …), …] with Python literals, bare (Llama 3.2, 4) or between marks (Llama 4, LFM2).

Chosen by `tools.choose`, used by the server. What calls in Python's spelling share is in _python. A bare bracket begins
a call only before a tool's name, a parenthesis and an argument's name.
"""

from quire.frontend.parse import Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base
from quire.frontend.tools._python import PythonCalls, call_format

MODEL_TYPES = ("llama4", "lfm2", "lfm2_moe")
TEMPLATE_MARKS = ("<|tool_call_start|>[", "[func_name1(params_name1=params_value1")
NEEDS_SPECIAL_TOKENS = True

_OPENERS = ("<|python_start|>", "<|tool_call_start|>")
_CLOSERS = ("<|python_end|>", "<|tool_call_end|>")
_MARKS = StopStrings((*_OPENERS, "["))


class Parser(PythonCalls):
    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._list())

    def _list(self) -> Steps[None]:
        yield from self.one_of(*_OPENERS)
        yield from self.space()
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self.call()
            yield from self.space()
            if (yield from self.expect(",", "]")) == "]":
                break
        yield from self.space()
        yield from self.one_of(*_CLOSERS)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    calls = [call_format(tool, required) for tool in tools]
    if required:
        return {"type": "tag", "begin": "[", "content": base.separated(calls, ", ", parallel=parallel), "end": "]"}
    lists = base.lists(tools, calls, parallel=parallel)
    return base.triggered([begun["begin"] for begun in lists], lists, parallel=False)
