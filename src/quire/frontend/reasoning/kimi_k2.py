"""Kimi K2 Thinking: <think>…</think>, or thinking that ends where calls of tools begin.

Chosen by `reasoning.choose`, used by the server; read as the <think> family is.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ()
TEMPLATE_MARKS = ("</think>{{render_content(message)}}",)
NEEDS_SPECIAL_TOKENS = True
START, END = "<think>", "</think>"


class Parser(think.Parser):
    ALSO_ENDS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
