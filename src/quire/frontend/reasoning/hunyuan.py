"""Hunyuan A13B: thinking between <think> and </think>, then the answer between <answer> and </answer>.

Named with --reasoning-parser, used by the server; read as the <think> family is. The tags around the answer are
dropped. (Hunyuan 3 is hy_v3.)
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # no real template is at hand
NEEDS_SPECIAL_TOKENS = True
START, END = "<think>", "</think>"


class Parser(think.Parser):
    ANSWER = ("<answer>", "</answer>")
