"""`quire list`: the models that have been fetched."""

import json
import time
from argparse import Namespace
from dataclasses import dataclass

from quire.api.commands._cache import CacheOptions
from quire.checkpoint.hub import shown_size
from quire.checkpoint.kept import KeptModel, kept_models
from quire.config import knob
from quire.config.flags import from_args

HELP = "list the models that have been fetched"
USAGE = "quire list [flags]"
ALIASES = ("ls",)


@dataclass(frozen=True)
class ListOptions:
    """What to show"""

    json: bool = knob(False, "print one JSON object")


OPTIONS = (ListOptions, CacheOptions)


def run(args: Namespace) -> int:
    models = kept_models(from_args(CacheOptions, args).download_dir)
    if from_args(ListOptions, args).json:
        facts = [
            {
                "name": model.name,
                "size_bytes": model.size_bytes,
                "modified_s": model.modified_s,
                "path": str(model.path),
            }
            for model in models
        ]
        print(json.dumps({"models": facts}))
    else:
        print(_table(models))
    return 0


def _table(models: list[KeptModel]) -> str:
    rows = [("NAME", "SIZE", "MODIFIED")]
    for model in models:
        modified = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_s))
        rows.append((model.name, shown_size(model.size_bytes), modified))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
