"""`quire rm MODEL…`: removes models that have been fetched, by the names that `quire list` shows."""

from argparse import Namespace
from dataclasses import dataclass

from quire.api.commands._cache import CacheOptions
from quire.checkpoint.hub import shown_size
from quire.checkpoint.kept import remove
from quire.config import knob
from quire.config.flags import from_args

HELP = "remove models that have been fetched"
USAGE = "quire rm MODEL... [flags]"


@dataclass(frozen=True)
class RemoveOptions:
    """What to remove"""

    names: list[str] = knob(
        [], "names as `quire list` shows them; org/name stands for all of them", positional="+", metavar="MODEL"
    )


OPTIONS = (RemoveOptions, CacheOptions)


def run(args: Namespace) -> int:
    download_dir = from_args(CacheOptions, args).download_dir
    for name in from_args(RemoveOptions, args).names:
        for model in remove(name, download_dir):
            print(f"removed {model.name} ({shown_size(model.size_bytes)})")
    return 0
