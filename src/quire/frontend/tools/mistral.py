"""Mistral: [TOOL_CALLS] and a JSON list of calls, or since tokenizer v11 [TOOL_CALLS]name[ARGS]{…} for each call.

Chosen by `tools.choose`, used by the server. Some versions put [CALL_ID] and an id between name and arguments.
"""

import re

from quire.frontend.parse import Steps
from quire.frontend.tools import base

MODEL_TYPES = ("mistral", "mistral3", "ministral", "ministral3", "mixtral", "mistral4")
TEMPLATE_MARKS = ("[TOOL_CALLS]",)
NEEDS_SPECIAL_TOKENS = True

_ID = re.compile(r"\w+")


class Parser(base.JsonCalls):
    OPENERS = ("[TOOL_CALLS]",)

    def calls(self) -> Steps[None]:
        yield from self.expect(*self.OPENERS)
        yield from self.space()
        if (yield from self.one_of("[")):
            yield from self.listed_calls()
            return
        name = yield from self.name()
        if (yield from self.one_of("[CALL_ID]")):
            while (yield from self.peek()) and self.read_run(_ID):
                pass
        yield from self.one_of("[ARGS]")
        yield from self.arguments_object(name)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """Both ways of writing; a model keeps to its own."""
    listed = base.listed(tools, "[TOOL_CALLS]", "", required=True, parallel=parallel)
    named = list(base.tags(tools, lambda name: f"[TOOL_CALLS]{name}[ARGS]", ""))
    if required:
        return {"type": "or", "elements": [listed, base.separated(named, "", parallel=parallel)]}
    return base.triggered(["[TOOL_CALLS]"], [listed, *named], parallel=parallel)
