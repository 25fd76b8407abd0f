"""`quire run MODEL [PROMPT]`: one answer to standard output, or a chat where nothing is asked yet."""

import os
import stat
import sys
from argparse import Namespace
from dataclasses import dataclass

from quire.api.commands._sampling import SamplingOptions
from quire.api.commands._talk import COMMANDS, Printer, TalkOptions, converse, local
from quire.api.llm import LLM
from quire.config import EngineConfig, knob
from quire.config.flags import from_args
from quire.errors import RequestError

HELP = "ask a model once, or chat with it"
USAGE = "quire run MODEL [flags] [--] [PROMPT]"


@dataclass(frozen=True)
class RunOptions:
    """The question"""

    name: str = knob("smollm2", "the model, as for --model", positional=True, metavar="MODEL")
    prompt: list[str] = knob(
        [], "what to ask; what is piped in comes before it; without either: a chat", positional="*", metavar="PROMPT"
    )


OPTIONS = (RunOptions, TalkOptions, SamplingOptions, EngineConfig)


def run(args: Namespace) -> int:
    options = from_args(RunOptions, args)
    sampling = from_args(SamplingOptions, args)
    beginning = from_args(TalkOptions, args).beginning
    config = from_args(EngineConfig, args).replace(model=options.name)
    asked = "\n\n".join(filter(None, [_piped(), " ".join(options.prompt)]))
    if not asked and not sys.stdin.isatty():
        raise RequestError('there is nothing to answer: quire run MODEL "What is the capital of France?"')
    with LLM.from_config(config) as llm:
        params = sampling.params(llm.model, None, seed=getattr(args, "seed", None))
        answer = local(llm, params)
        if not asked:
            print(f"{COMMANDS}.\n", file=sys.stderr)
            converse(answer, beginning)
        else:
            answer([*beginning, {"role": "user", "content": asked}], Printer())
            print()
    return 0


def _piped() -> str:
    """The text of a pipe or a file; nothing where standard input is a terminal, a device or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return ""
    is_text = stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return sys.stdin.read().strip("\n") if is_text else ""
