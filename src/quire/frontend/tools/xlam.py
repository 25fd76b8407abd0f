"""xLAM: a JSON list of calls, bare, fenced, after [TOOL_CALLS] or in <tool_call> tags.

Named with --tool-call-parser, used by the server. What is shared with other JSON formats is in base.
"""

from quire.frontend.tools import base

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # no real template is at hand
NEEDS_SPECIAL_TOKENS = True


class Parser(base.JsonCalls):
    OPENERS = ("```json", "```", "[TOOL_CALLS]", "<tool_call>")
    CLOSERS_AFTER = ("```", "</tool_call>")
    BARE = ("[",)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """A bare list. Without `required`, a list in the text that begins with an object with a name must be calls."""
    if required:
        return base.listed(tools, "", "", required=True, parallel=parallel)
    lists = base.lists(tools, base.json_tags(tools), parallel=parallel)
    return base.triggered(['[{"name": "'], lists, parallel=False)
