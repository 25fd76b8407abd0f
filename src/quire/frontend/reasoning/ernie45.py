"""ERNIE 4.5: thinking between <think> and </think>, then the answer, often between <response> and </response>.

Named with --reasoning-parser, used by the server; read as the <think> family is. The tags around the response are
dropped.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # no real template is at hand
NEEDS_SPECIAL_TOKENS = True
START, END = "<think>", "</think>"


class Parser(think.Parser):
    ANSWER = ("<response>", "</response>")
