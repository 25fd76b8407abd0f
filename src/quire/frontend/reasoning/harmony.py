"""Harmony (gpt-oss): thinking is what the model writes on the channel analysis.

Chosen by `reasoning.choose`, used by the server; the reading is in `frontend/harmony.py`. Calls are passed on to
`tools/harmony.py` as they are.
"""

from typing import Any

from quire.frontend.harmony import Harmony

MODEL_TYPES = ("gpt_oss",)
TEMPLATE_MARKS = ("<|channel|>analysis",)
NEEDS_SPECIAL_TOKENS = True
START, END = "<|channel|>analysis<|message|>", "<|end|>"


def answer(form: dict[str, Any]) -> dict[str, Any]:
    """The structural tag of an answer with the header before it; after thinking, the header begins a new message."""
    start = {"type": "optional", "content": {"type": "const_string", "value": "<|start|>assistant"}}
    header = {"type": "const_string", "value": "<|channel|>final<|message|>"}
    return {"type": "sequence", "elements": [start, header, form]}


class Parser(Harmony):
    def __init__(self, starts_open: bool) -> None:
        super().__init__(None, starts_open)
