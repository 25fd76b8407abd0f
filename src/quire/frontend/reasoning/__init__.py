"""Formats of thinking, one file each, named as `--reasoning-parser` names them; `choose` finds a model's own.

Used by the server when it starts, and `is_open` for each prompt. A file's literals are read without importing it, as
those of the tool-call formats.
"""

from types import ModuleType

from quire import registry

_PACKAGE = "quire.frontend.reasoning"


def choose(template: str | None, model_type: str) -> str | None:
    """The format a model's chat template knows, else the one of its type where there is no template."""

    def longest_mark(marks: tuple[str, ...]) -> int:
        return max((len(mark) for mark in marks if mark in (template or "")), default=0)

    marks_by_name = registry.literals(_PACKAGE, "TEMPLATE_MARKS")
    best = max(marks_by_name, key=lambda name: longest_mark(marks_by_name[name]))
    if longest_mark(marks_by_name[best]):
        return best
    if template is not None:
        return None
    types = registry.literals(_PACKAGE, "MODEL_TYPES")
    return next((name for name, found in types.items() if model_type in found), None)


def is_open(module: ModuleType, prompt_text: str) -> bool:
    """Whether a rendered prompt has just opened thinking.

    Only its very end counts: further up, the mark may be what a user wrote. (A prompt that continues a thought begun in
    a message is not seen.)
    """
    return bool(module.START) and prompt_text.rstrip().endswith(module.START)
