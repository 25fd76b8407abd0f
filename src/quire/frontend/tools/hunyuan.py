"""Hunyuan A13B: a JSON list of calls between <tool_calls> and </tool_calls>. (Hunyuan 3 is hy_v3.)

Named with --tool-call-parser, used by the server. What is shared with other JSON formats is in base.
"""

from quire.frontend.tools import base

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # <tool_calls> is also that of templates whose JSON generic_json reads
NEEDS_SPECIAL_TOKENS = True


class Parser(base.JsonCalls):
    OPENERS = ("<tool_calls>",)
    CLOSERS_AFTER = ("</tool_calls>",)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return base.listed(tools, "<tool_calls>", "</tool_calls>", required=required, parallel=parallel)
