"""`quire serve MODEL`: an OpenAI-compatible server."""

from argparse import Namespace
from dataclasses import dataclass

from quire.config import EngineConfig, ServingConfig, knob
from quire.config.file import read_options
from quire.config.flags import from_args
from quire.config.server import ServerConfig

HELP = "serve a model over HTTP, as OpenAI's API does"
USAGE = "quire serve [MODEL] [flags]"


@dataclass(frozen=True)
class ServeOptions:
    """What to serve"""

    name: str | None = knob(None, "the model, as for --model", positional="?", metavar="MODEL")
    config: str | None = knob(
        None, "a YAML file with any of these flags by name; what is typed here wins", metavar="FILE"
    )


OPTIONS = (ServeOptions, ServerConfig, ServingConfig, EngineConfig)


def run(args: Namespace) -> int:
    from quire.api.server.run import serve  # uvicorn and all that: not for --help

    options = from_args(ServeOptions, args)
    if options.config is not None:
        args = Namespace(**{**read_options(options.config, OPTIONS[1:]), **vars(args)})
    server = from_args(ServerConfig, args)
    serving = from_args(ServingConfig, args)
    engine = from_args(EngineConfig, args)
    if options.name is not None:
        engine = engine.replace(model=options.name)
    return serve(engine, serving, server)
