"""`quire info MODEL`: what a model is and what it takes on this machine, without loading it."""

import importlib
import json
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig, knob
from quire.config.flags import from_args
from quire.frontend.model import ModelInfo

HELP = "show what a model is and what fits on this machine"
USAGE = "quire info [MODEL] [flags]"
ALIASES = ("show",)

DESCRIBE = "quire.worker.describe"


@dataclass(frozen=True)
class InfoOptions:
    """What to show"""

    name: str | None = knob(None, "the model, as for --model", positional="?", metavar="MODEL")
    json: bool = knob(False, "print one JSON object")


OPTIONS = (InfoOptions, EngineConfig)


def run(args: Namespace) -> int:
    options = from_args(InfoOptions, args)
    config = from_args(EngineConfig, args)
    typed = options.name or config.model.model
    model = ModelInfo.open(config.replace(model=typed, skip_tokenizer_init=True))
    facts = {"model": typed, **importlib.import_module(DESCRIBE).describe(model.config)}
    facts["kv_tokens"] = facts["kv_memory_bytes"] // facts["kv_bytes_per_token"]
    print(json.dumps(facts) if options.json else _table(facts))
    return 0


def _table(facts: dict[str, Any]) -> str:
    types = ", ".join(f"{name} ×{count}" for name, count in facts["weight_types"].items()) or "none (config only)"
    requests = facts["kv_tokens"] / facts["max_model_len"]
    path = facts["model_file"] or "the fallback: transformers' own layers around our attention and cache"
    rows = [
        ("model", facts["model"]),
        ("architecture", f"{facts['architecture']}, {facts['num_layers']} layers"),
        ("runs through", path),
        ("parameters", f"{facts['num_parameters'] / 1e6:,.1f} million"),
        ("checkpoint", types),
        ("dtype", facts["dtype"]),
        ("weights", f"{_bytes(facts['weight_bytes'])} in memory"),
        *(("", _weights_row(**row)) for row in facts["weights"]),
        (
            "KV per token",
            f"{facts['kv_bytes_per_token']:,} bytes in {facts['kv_cache_dtype']} ({'; '.join(facts['kv_groups'])})",
        ),
        ("KV memory", f"{_bytes(facts['kv_memory_bytes'])}: {facts['kv_tokens']:,} tokens"),
        ("fits", f"{requests:,.1f} requests of max_model_len {facts['max_model_len']:,} at once"),
        ("kernels", f"attention {facts['attention']}, linear {facts['linear']}"),
        *(("passed over", f"{name}: {why}") for name, why in facts["passed_over"].items()),
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _weights_row(kind: str, method: str, bits: float, bytes: int) -> str:
    return f"{kind:<17} {method:<22} {bits:>5g} bits {_bytes(bytes):>10}"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
