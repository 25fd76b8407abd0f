"""Granite: <think>…</think><response>…</response>, or in version 3.2 two sentences that announce thought and response.

Chosen by `reasoning.choose`, used by the server; read as the <think> family is. The tags around the response are
dropped.
"""

from quire.frontend.reasoning import think

MODEL_TYPES = ()
TEMPLATE_MARKS = (
    "write your response between <response></response>",
    "Here is my thought process:",
    "'Here is my response:'",
)
NEEDS_SPECIAL_TOKENS = False
START, END = "<think>", "</think>"


class Parser(think.Parser):
    MARKS = (
        (START, END),
        ("Here is my thought process:", "Here is my response:"),
        ("Here's my thought process:", "Here's my response:"),
    )
    ANSWER = ("<response>", "</response>")
