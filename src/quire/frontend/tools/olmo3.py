"""OLMo 3: calls in Python's spelling between <function_calls> and </function_calls>, one on each line.

Named with --tool-call-parser, used by the server. Words may be JSON's (true, null). What calls in Python's spelling
share is in _python.
"""

from quire.frontend.parse import Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base
from quire.frontend.tools._python import PythonCalls, call_format

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # no real template is at hand
NEEDS_SPECIAL_TOKENS = True

_BEGIN, _END = "<function_calls>", "</function_calls>"
_MARKS = StopStrings((_BEGIN,))


class Parser(PythonCalls):
    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._lines())

    def _lines(self) -> Steps[None]:
        yield from self.expect(_BEGIN)
        yield from self.space()
        while True:
            yield from self.call()
            yield from self.space()
            if (yield from self.one_of(_END)) or not (yield from self.peek()):
                return


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    calls = base.separated([call_format(tool, required) for tool in tools], "\n", parallel=parallel)
    block = {"type": "tag", "begin": f"{_BEGIN}\n", "content": calls, "end": f"\n{_END}"}
    return block if required else base.triggered([_BEGIN], [block], parallel=False)
