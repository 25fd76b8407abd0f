"""Harmony (gpt-oss): thinking is what the model writes on the channel analysis.

Chosen by `reasoning.choose`, used by the server; the reading is in `frontend/harmony.py`. Calls are passed on to
`tools/harmony.py` as they are.
"""

from quire.frontend.harmony import Harmony

MODEL_TYPES = ("gpt_oss",)
TEMPLATE_MARKS = ("<|channel|>analysis",)
NEEDS_SPECIAL_TOKENS = True
START, END = "<|channel|>analysis<|message|>", "<|end|>"


class Parser(Harmony):
    def __init__(self, starts_open: bool) -> None:
        super().__init__(None, starts_open)
