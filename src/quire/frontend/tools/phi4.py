"""Phi-4-mini: a JSON list of calls in <|tool_call|>…<|/tool_call|>, or after the word functools (Firefunction too).

Chosen by `tools.choose`, used by the server. What is shared with other JSON formats is in base.
"""

from quire.frontend.tools import base

MODEL_TYPES = ("phi4mm", "phi4flash", "phi4_multimodal")  # Phi-4-mini has phi3's type, which says nothing
TEMPLATE_MARKS = ("<|/tool|>", "functools[")
NEEDS_SPECIAL_TOKENS = True


class Parser(base.JsonCalls):
    OPENERS = ("<|tool_call|>", "functools")
    CLOSERS_AFTER = ("<|/tool_call|>",)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """The marks of Phi-4-mini; without `required` functools[ is constrained too."""
    marked = base.listed(tools, "<|tool_call|>", "<|/tool_call|>", required=True, parallel=parallel)
    if required:
        return marked
    named = base.listed(tools, "functools", "", required=True, parallel=parallel)
    return base.triggered(["<|tool_call|>", "functools["], [marked, named], parallel=False)
