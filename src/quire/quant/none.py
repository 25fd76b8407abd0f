"""`--quantization none`, and checkpoints without a quantization: every weight is kept plain."""

from collections.abc import Callable
from typing import Any

from quire.quant._select import refuse_settings
from quire.quant.base import Choice, MethodMaker


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    """Chooses the method of a weight by its path in checkpoints. Every file of this folder that names one has this.

    `settings`: `quantization_config` of config.json; empty if the checkpoint is plain and the option asks for this.
    Other names of it that users and checkpoints know are ALIASES.
    """
    refuse_settings(settings)
    return lambda path, ways: ways.plain
