"""`--quantization none`, and checkpoints without a quantization: every weight is kept plain."""

from typing import Any

from quire.quant.base import Method, Use


def method(path: str, use: Use, plain: type[Method], settings: dict[str, Any]) -> type[Method]:
    """The method for the weight that a checkpoint calls `path`. Every file of this folder but base.py has one.

    `plain`: the method for unquantized weights of this use on this device. `settings`: `quantization_config` of
    config.json.
    """
    return plain
