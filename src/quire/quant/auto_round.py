"""AutoRound: whole numbers in GPTQ's or AWQ's packing."""

from collections.abc import Callable
from typing import Any

from quire.quant import awq
from quire.quant._select import Modules, check, choice, group_size, is_plain, nested_names, objects, patterns, refuse
from quire.quant.base import Choice, MethodMaker, Reader, Use
from quire.quant.gptq import Gptq

PACKINGS = {
    "auto_round": "gptq", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
}  # fmt: skip


def quantization(settings: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    check(settings, {"act_bits": (16, 32), "quant_lm_head": (True, False)})
    refuse(settings, "rotation_config")
    default = _reader(settings)
    skipped = Modules(settings.get("modules_to_not_convert"), "modules_to_not_convert")
    blocks = tuple(f"{name}." for name in _blocks(settings))
    named = {name: _reader({**settings, **values}) for name, values in objects(settings, "extra_config").items()}
    texts = [name for name in named if not is_plain(name)]
    compiled = patterns((rf"(?:{text})\Z" for text in texts), "extra_config")
    rules = [(known, named[text]) for known, text in zip(compiled, texts)]

    def find_reader(path: str, use: Use) -> Reader | None:
        """A layer's own name counts before all else."""
        if path in named:
            return named[path]
        is_meant = settings.get("quant_lm_head") if use is Use.HEAD else not blocks or f"{path}.".startswith(blocks)
        return next((reader for known, reader in rules if known.match(path)), default) if is_meant else None

    def find(path: str, ways: Choice) -> MethodMaker:
        reader = None if ways.is_table or path in skipped else find_reader(path, ways.use)
        return ways.plain if reader is None else ways.read_by(reader)

    return find


def _blocks(settings: dict[str, Any]) -> list[str]:
    """Paths of the blocks that are quantized, as a list or in one text with commas; none: all are."""
    keys = ("block_name_to_quantize", "to_quant_block_names")
    key = next((key for key in keys if settings.get(key)), keys[0])
    value = settings.get(key)
    return [name.strip() for name in (value.split(",") if isinstance(value, str) else nested_names(value, key))]


def _reader(settings: dict[str, Any]) -> Reader | None:
    """None: not quantized."""
    bits = choice(settings, "bits", (2, 4, 8, 16))
    if bits == 16:
        return None
    check(settings, {"data_type": ("int",)})
    refuse(settings, "super_bits", "super_group_size")
    packing = PACKINGS[choice(settings, "packing_format", PACKINGS, "auto_round")]
    group = group_size(settings)
    if packing == "awq":
        choice(settings, "bits", (4,))
        return awq.Awq(group)
    return Gptq(bits, group, adds_one=packing == "gptq", has_order=False)
