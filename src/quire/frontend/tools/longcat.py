"""LongCat: each call is <longcat_tool_call>{"name": …, "arguments": {…}}</longcat_tool_call>.

Named with --tool-call-parser, used by the server. What is shared with other JSON formats is in base.
"""

from quire.frontend.tools import base

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # no real template is at hand
NEEDS_SPECIAL_TOKENS = True


class Parser(base.JsonCalls):
    OPENERS = ("<longcat_tool_call>",)
    CLOSERS_AFTER = ("</longcat_tool_call>",)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return base.tagged_json(tools, "<longcat_tool_call>", "</longcat_tool_call>", required=required, parallel=parallel)
