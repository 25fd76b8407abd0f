"""Gemma 4: <|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, bare names and strings in own marks.

Chosen by `tools.choose`, used by the server. Nothing is escaped in a string; its end mark is a special token.
"""

import json
import re

from quire.frontend.parse import Emit, Malformed, Steps
from quire.frontend.stop import StopStrings
from quire.frontend.tools import base
from quire.frontend.tools._python import WORDS

MODEL_TYPES = ("gemma4", "gemma4_text")
TEMPLATE_MARKS = ("<|tool_call>call:",)
NEEDS_SPECIAL_TOKENS = True

_BEGIN, _END = "<|tool_call>", "<tool_call|>"
_QUOTE = '<|"|>'
_MARKS = StopStrings((_BEGIN,))
_QUOTES = StopStrings((_QUOTE,))
_NAME = re.compile(r"""[^\s:,{}\[\]<>"]+""")


class Parser(base.ToolParser):
    QUOTES = '<"'

    def run(self) -> Steps[None]:
        while (yield from self.until(_MARKS, self.content)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps[None]:
        yield from self.expect(_BEGIN)
        yield from self.space()
        yield from self.expect("call:")
        name = yield from self.name()
        yield from self.arguments_object(name)
        yield from self.space()
        yield from self.one_of(_END)

    def string(self, emit: Emit) -> Steps[None]:
        if (yield from self.peek()) == '"':  # JSON, which other models of the family write
            yield from super().string(emit)
            return
        yield from self.expect(_QUOTE)
        emit('"')
        if not (yield from self.until(_QUOTES, lambda text: emit(base.quoted(text)))):
            raise Malformed
        self.read(len(_QUOTE))
        emit('"')

    def property_name(self, emit: Emit) -> Steps[None]:
        if (yield from self.peek()) in tuple(self.QUOTES):
            yield from self.string(emit)
            return
        name = ""
        while (yield from self.peek()) and (text := self.read_run(_NAME)):
            name += text
        if not name:
            raise Malformed
        emit(json.dumps(name, ensure_ascii=False))

    def scalar(self, text: str) -> str | None:
        return WORDS.get(text) or super().scalar(text)  # the template writes None


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    calls = list(base.tags(tools, lambda name: f"{_BEGIN}call:{name}", _END, style="quoted", quote=_QUOTE))
    if required:
        return base.separated(calls, "", parallel=parallel)
    return base.triggered([_BEGIN], calls, parallel=parallel)
