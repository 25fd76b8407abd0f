"""`quire chat [MODEL]`: a conversation in the terminal, with a model of this machine or with a server.

Ctrl-C stops an answer, Ctrl-D or /exit ends the chat; see /help.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from quire import env
from quire.api.commands._remote import RemoteModel
from quire.api.commands._sampling import SamplingOptions
from quire.api.commands._talk import COMMANDS, TalkOptions, converse, local
from quire.api.llm import LLM
from quire.config import EngineConfig, knob
from quire.config.flags import from_args

HELP = "chat in the terminal, with a model or with a server"
USAGE = """quire chat [MODEL] [flags]
       quire chat [MODEL] --base-url URL [flags]"""


@dataclass(frozen=True)
class ChatOptions:
    """Whom to talk to"""

    name: str | None = knob(None, "the model, as for --model", positional="?", metavar="MODEL")
    base_url: str | None = knob(
        None,
        "a server that speaks OpenAI's protocol, such as http://127.0.0.1:8000/v1, instead of a model of this machine",
        names=("--url",),
        metavar="URL",
    )


@dataclass(frozen=True)
class RemoteOptions:
    """The server"""

    model: str | None = knob(None, "the model's name there (default: the first that it has)", names=("--model-name",))
    api_key: str | None = knob(
        None, "the key to send (default: QUIRE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY)", metavar="KEY"
    )
    seed: int | None = knob(None, "the seed to send")


def options_of(argv: Sequence[str]) -> tuple[type, ...]:
    """A server's answers need no engine."""
    typed = {word.partition("=")[0].replace("_", "-") for word in argv}
    last = RemoteOptions if typed & {"--base-url", "--url"} else EngineConfig
    return (ChatOptions, TalkOptions, SamplingOptions, last)


def run(args: Namespace) -> int:
    options = from_args(ChatOptions, args)
    sampling = from_args(SamplingOptions, args)
    beginning = from_args(TalkOptions, args).beginning
    if options.base_url is not None:
        there = from_args(RemoteOptions, args)
        fields = sampling.given() | ({} if there.seed is None else {"seed": there.seed})
        model = RemoteModel(options.base_url, there.api_key or env.client_key(), options.name or there.model, fields)
        print(f"Talking to {model.model}. {COMMANDS}.\n", file=sys.stderr)
        converse(model.answer, beginning)
        return 0
    config = from_args(EngineConfig, args)
    if options.name is not None:
        config = config.replace(model=options.name)
    print(f"Starting {config.model.model} …", file=sys.stderr)
    started_s = time.monotonic()
    with LLM.from_config(config) as llm:
        print(f"Ready in {time.monotonic() - started_s:.1f} s. {COMMANDS}.\n", file=sys.stderr)
        params = sampling.params(llm.model, None, seed=getattr(args, "seed", None))
        converse(local(llm, params), beginning)
    return 0
