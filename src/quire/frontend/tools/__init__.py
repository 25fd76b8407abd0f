"""Tool-call formats, one file each, named as `--tool-call-parser` names them; `choose` finds a model's own.

Used by the server when it starts. A file's literals are read without importing it: MODEL_TYPES are Hugging Face's model
types, TEMPLATE_MARKS pieces of chat templates that only this format has.
"""

from quire import registry

_PACKAGE = "quire.frontend.tools"


def choose(template: str | None, model_type: str) -> str | None:
    """The format a model's chat template writes, else the one of its type; None if we have none that fits.

    The type decides only where the template says nothing about calls: a template with a format of its own that we do
    not know must not be read as another one.
    """
    text = (template or "").replace("\\n", "\n").replace('\\"', '"')

    def longest_mark(marks: tuple[str, ...]) -> int:
        return max((len(mark) for mark in marks if mark in text), default=0)

    marks_by_name = registry.literals(_PACKAGE, "TEMPLATE_MARKS")
    best = max(marks_by_name, key=lambda name: longest_mark(marks_by_name[name]))
    if longest_mark(marks_by_name[best]):
        return best
    if "tool_calls" in text:
        return None
    types = registry.literals(_PACKAGE, "MODEL_TYPES")
    return next((name for name, found in types.items() if model_type in found), None)
