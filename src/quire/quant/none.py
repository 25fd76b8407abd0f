"""`--quantization none`, and checkpoints that say nothing of one: every weight is kept plain."""

from typing import Any

from quire.quant.base import Method, Use


def method(path: str, use: Use, plain: type[Method], settings: dict[str, Any]) -> type[Method]:
    """What keeps the weight that a checkpoint calls `path`. `plain`: what keeps unquantized weights for such use on this device;
    `settings`: config.json's `quantization_config`. Every file of this folder that names a quantization has this function."""
    return plain
