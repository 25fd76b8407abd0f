"""`quire pull MODEL`: fetches a model, to be run later."""

from argparse import Namespace
from dataclasses import dataclass

from quire.api.commands._cache import CacheOptions
from quire.checkpoint.find import find
from quire.config import knob
from quire.config.flags import from_args

HELP = "fetch a model"
USAGE = "quire pull MODEL [flags]"


@dataclass(frozen=True)
class PullOptions:
    """What to fetch"""

    name: str = knob("smollm2", "smollm2, or a hub's org/name or org/name:Q4_K_M", positional=True, metavar="MODEL")
    revision: str | None = knob(None, "branch, tag or commit of a hub's model")


OPTIONS = (PullOptions, CacheOptions)


def run(args: Namespace) -> int:
    options = from_args(PullOptions, args)
    cache = from_args(CacheOptions, args)
    print(find(options.name, revision=options.revision, download_dir=cache.download_dir).path)
    return 0
