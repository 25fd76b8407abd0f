"""Mistral's reasoning models (Magistral, Ministral): thinking between [THINK] and [/THINK].

Chosen by `reasoning.choose`, used by the server; read as the <think> family is.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ()
TEMPLATE_MARKS = ("[THINK]",)
NEEDS_SPECIAL_TOKENS = True
START, END = "[THINK]", "[/THINK]"


class Parser(think.Parser):
    MARKS = ((START, END), (think.START, think.END))  # the first Magistral wrote the marks of `think`
