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
    "Any other decoder of the installed transformers whose attention goes through its attention registry "
    "(StableLM, OPT, Nemotron, …) runs through the fallback: transformers' own layers around our attention, cache, "
    "scheduler and sampler."
)
LEGEND = "Parity: the largest difference of a logprob from transformers', tiny random weights in float32."


@dataclass(frozen=True)
class ModelsOptions:
    """What to show"""

    json: bool = knob(False, "print one JSON object")


OPTIONS = (ModelsOptions,)


def run(args: Namespace) -> int:
    models = importlib.import_module(DESCRIBE).library()
    if from_args(ModelsOptions, args).json:
        print(json.dumps({"models": models, "fallback": FALLBACK}))
    else:
        print(f"{_table(models)}\n\n{LEGEND}\n{FALLBACK}")
    return 0


def _table(models: list[dict[str, Any]]) -> str:
    rows = [("architecture", "file", "KV cache", "GGUF", "parity")]
    for model in sorted(models, key=lambda model: model["architecture"].lower()):
        gguf = "yes" if model["gguf"] else "no"
        parity = "not measured" if model["parity"] is None else f"{model['parity']:.0e}"
        rows.append((model["architecture"], model["file"], " + ".join(model["kv"]), gguf, parity))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
