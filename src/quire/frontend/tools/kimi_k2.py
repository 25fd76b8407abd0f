"""Kimi K2: calls between section marks, each <|tool_call_begin|>functions.name:index<|tool_call_argument_begin|>{…}.

Chosen by `tools.choose`, used by the server. The index counts the conversation's calls and is dropped.
"""

import re

from quire.frontend.parse import Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base

MODEL_TYPES = ("kimi_k2",)
TEMPLATE_MARKS = ("<|tool_calls_section_begin|>",)
NEEDS_SPECIAL_TOKENS = True

_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")  # some models write the other
_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL = "<|tool_call_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_MARKS = StopStrings((*_BEGINS, _CALL))  # a model may leave out the section's marks
_INDEX = re.compile(r"[0-9]+")


class Parser(base.ToolParser):
    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._section())

    def _section(self) -> Steps[None]:
        yield from self.one_of(*_BEGINS)
        yield from self.space()
        yield from self.expect(_CALL)
        while True:
            yield from self._call()
            yield from self.space()
            if not (yield from self.one_of(_CALL)):
                break
        yield from self.one_of(*_ENDS)

    def _call(self) -> Steps[None]:
        yield from self.space()
        found = yield from self.expect(*self.tools, *(f"functions.{name}" for name in self.tools))
        name = found if found in self.tools else found.removeprefix("functions.")
        if (yield from self.one_of(":")):
            while (yield from self.peek()) and self.read_run(_INDEX):
                pass
        yield from self.space()
        yield from self.expect(_ARGUMENTS)
        yield from self.arguments_object(name)
        yield from self.space()
        yield from self.expect(_CALL_END)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    index = {"type": "regex", "pattern": "[0-9]{1,4}"}
    calls: list[base.Format] = [
        {
            "type": "tag",
            "begin": f"{_CALL}functions.{tool['function']['name']}:",
            "content": base.sequence(index, base.const(_ARGUMENTS), base.arguments_of(tool)),
            "end": _CALL_END,
        }
        for tool in tools
    ]
    several = base.separated(calls, "", parallel=parallel)
    block = {"type": "tag", "begin": _BEGINS[0], "content": several, "end": _ENDS[0]}
    return block if required else base.triggered([_BEGINS[0]], [block], parallel=False)
