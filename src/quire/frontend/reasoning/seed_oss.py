"""Seed-OSS: thinking between <seed:think> and </seed:think>.

Chosen by `reasoning.choose`, used by the server; read as the <think> family is. What the model says there about its
budget is part of the thinking.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ("seed_oss",)
TEMPLATE_MARKS = ("<seed:think>",)
NEEDS_SPECIAL_TOKENS = True
START, END = "<seed:think>", "</seed:think>"


class Parser(think.Parser):
    MARKS = ((START, END),)
