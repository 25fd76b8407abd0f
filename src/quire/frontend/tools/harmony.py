"""Harmony (gpt-oss): a call is a message on the commentary channel to functions.NAME, whose text is its arguments.

Chosen by `tools.choose`, used by the server; the reading is in `frontend/harmony.py`. The model stops at a call's end,
so that it cannot make two at once: `parallel` changes nothing.
"""

from quire.frontend.harmony import Harmony
from quire.frontend.tools import base

MODEL_TYPES = ("gpt_oss",)
TEMPLATE_MARKS = ("<|channel|>commentary",)
NEEDS_SPECIAL_TOKENS = True


class Parser(Harmony):
    def __init__(self, tools: list[base.Tool]) -> None:
        super().__init__(tools)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """From the beginning of the answer, or after the end of a message of thinking; a stop token ends the call."""
    spelled = [
        *base.tags(tools, lambda name: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),
        *base.tags(tools, lambda name: f" to=functions.{name}<|channel|>commentary json<|message|>", ""),
    ]
    if required:
        start = {"type": "optional", "content": base.const("<|start|>assistant")}
        return base.sequence(start, {"type": "or", "elements": spelled})
    started = [{**tag, "begin": "<|start|>assistant" + tag["begin"]} for tag in spelled[len(tools) :]]
    triggers = ["<|channel|>commentary to=functions.", "<|start|>assistant to=functions."]
    text = base.triggered(triggers, spelled[: len(tools)] + started, parallel=False)
    return {"type": "or", "elements": [*spelled[len(tools) :], text]}
