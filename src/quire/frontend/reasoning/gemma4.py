"""Gemma 4: thinking is a channel of its own, <|channel>thought … <channel|>, before the answer.

Chosen by `reasoning.choose`, used by the server; read as the <think> family is.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ("gemma4", "gemma4_text")
TEMPLATE_MARKS = ("<|channel>thought",)
NEEDS_SPECIAL_TOKENS = True
START, END = "<|channel>thought", "<channel|>"


class Parser(think.Parser):
    MARKS = ((START, END),)
