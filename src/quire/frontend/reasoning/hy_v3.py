"""Hunyuan 3 (Hy3): thinking between <think:opensource> and </think:opensource>.

Chosen by `reasoning.choose`, used by the server; read as the <think> family is.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ("hy_v3",)
TEMPLATE_MARKS = ("<think{}>", "<think:opensource>")
NEEDS_SPECIAL_TOKENS = True
START, END = "<think:opensource>", "</think:opensource>"


class Parser(think.Parser):
    MARKS = ((START, END),)
