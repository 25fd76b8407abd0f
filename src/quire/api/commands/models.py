"""`quire models`: the architectures that run, and how well each is proven."""

import importlib
import json
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from quire.config import knob
from quire.config.flags import from_args

HELP = "list the supported model architectures"
USAGE = "quire models [--json]"

DESCRIBE = "quire.worker.describe"

FALLBACK = (
    "Any other decoder of the installed transformers whose attention goes through its attention registry (StableLM, OPT, Nemotron, …) "
    "runs through the fallback: transformers' own layers around our attention, cache, scheduler and sampler."
)
LEGEND = "Parity: the largest difference of a logprob from transformers', tiny random weights in float32."


@dataclass(frozen=True)
class ModelsOptions:
    """What to show"""

    json: bool = knob(False, "print one JSON object")


OPTIONS = (ModelsOptions,)


def run(args: Namespace) -> int:
    models = importlib.import_module(DESCRIBE).library()
    asked = from_args(ModelsOptions, args).json
    print(
        json.dumps({"models": models, "fallback": FALLBACK}) if asked else f"{_table(models)}\n\n{LEGEND}\n{FALLBACK}"
    )
    return 0


def _table(models: list[dict[str, Any]]) -> str:
    rows = [("architecture", "file", "KV cache", "GGUF", "parity")]
    for m in sorted(models, key=lambda m: m["architecture"].lower()):
        parity = "not measured" if m["parity"] is None else f"{m['parity']:.0e}"
        rows.append((m["architecture"], m["file"], " + ".join(m["kv"]), "yes" if m["gguf"] else "no", parity))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
