"""Granite 3: a JSON list of calls after <|tool_call|>, or <tool_call> in the first versions. (Granite 4 is hermes.)

Chosen by `tools.choose`, used by the server. What is shared with other JSON formats is in base.
"""

from quire.frontend.tools import base

MODEL_TYPES = ("granite", "granitemoe", "granitemoeshared")
TEMPLATE_MARKS = ("<|tool_call|> followed by a JSON list", "<tool_call> followed by a JSON list")
NEEDS_SPECIAL_TOKENS = True


class Parser(base.JsonCalls):
    OPENERS = ("<|tool_call|>", "<tool_call>")


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return base.listed(tools, "<|tool_call|>", "", required=required, parallel=parallel)
