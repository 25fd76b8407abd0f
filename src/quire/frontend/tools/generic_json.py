"""Any model told to answer with JSON: {"name": …, "arguments": {…}} or a list of them, bare, fenced or between tags.

For models without a format of their own, and for templates whose tags only wrap such JSON (Apriel, MiniMax-M1,
Nemotron). JSON is a call only if it has the members of one and a tool's name; every other is content.
"""

from quire.frontend.tools import base

MODEL_TYPES = ()
TEMPLATE_MARKS = ("<tool_calls>", "<TOOLCALL>[")
NEEDS_SPECIAL_TOKENS = False


class Parser(base.JsonCalls):
    OPENERS = ("<tool_calls>", "<TOOLCALL>", "```json", "```")
    CLOSERS_AFTER = ("</tool_calls>", "</TOOLCALL>", "```")
    BARE = ("{", "[")
    SEPARATORS = (",", ";")
    NAME_KEYS = ("name", "tool_name")


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """Without `required`, text in which {"name": "… stands must be a call."""
    calls = base.json_tags(tools)
    if not required:
        return base.triggered(['{"name": "'], calls, parallel=parallel)
    if not parallel:
        return base.separated(calls, "", parallel=False)
    return base.listed(tools, "", "", required=True, parallel=True)
