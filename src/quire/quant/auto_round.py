"""AutoRound: whole numbers in GPTQ's or AWQ's packing."""

from collections.abc import Callable
from typing import Any

from quire.errors import BadModelFileError
from quire.quant import awq
from quire.quant._select import Modules, choice, group_size, pattern
from quire.quant.base import Choice, MethodMaker, Reader, Use
from quire.quant.gptq import Gptq

PACKINGS = {
    "auto_round": "gptq", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
}  # fmt: skip


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    choice(settings, "data_type", ("int",), "int")
    default = _reader(settings)
    skipped = Modules(settings.get("modules_to_not_convert"), "modules_to_not_convert")
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(values, dict) for values in extra.values()):
        raise BadModelFileError("quantization_config gives extra_config as something else than an object of objects")
    rules = [(pattern(name, "extra_config"), _reader({**settings, **values})) for name, values in extra.items()]

    def find(path: str, ways: Choice) -> MethodMaker:
        if ways.is_table or ways.use is Use.HEAD or path in skipped:
            return ways.plain
        reader = next((reader for known, reader in rules if known.fullmatch(path)), default)
        return ways.plain if reader is None else ways.read_by(reader)

    return find


def _reader(settings: dict[str, Any]) -> Reader | None:
    """None: not quantized."""
    bits = choice(settings, "bits", (2, 4, 8, 16))
    if bits == 16:
        return None
    packing = PACKINGS[choice(settings, "packing_format", PACKINGS, "auto_round")]
    group = group_size(settings)
    if packing == "awq":
        return awq.Awq(group)
    return Gptq(bits, group, adds_one=packing == "gptq", has_order=False)
