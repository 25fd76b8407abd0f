"""Hermes: each call is <tool_call>{"name": …, "arguments": {…}}</tool_call>. Qwen 2.5 and 3, Granite 4 and many more.

Chosen by `tools.choose`, used by the server. What is shared with other JSON formats is in base.
"""

from quire.frontend.tools import base

MODEL_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granitemoehybrid")
TEMPLATE_MARKS = (
    '<tool_call>\n{"name": ',
    '<tool_call>{"name": ',
    "within <tool_call></tool_call> XML tags as follows",
)
NEEDS_SPECIAL_TOKENS = True  # some models have the marks as special tokens


class Parser(base.JsonCalls):
    OPENERS = ("<tool_call>",)
    CLOSERS_AFTER = ("</tool_call>",)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return base.tagged_json(tools, "<tool_call>", "</tool_call>", required=required, parallel=parallel)
