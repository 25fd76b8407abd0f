"""`quire generate`: continue a text as it is, streaming to standard output; `quire run` asks through the template."""

import sys
from argparse import Namespace
from dataclasses import dataclass

from quire.api.commands._sampling import SamplingOptions
from quire.api.llm import LLM
from quire.config import EngineConfig, knob
from quire.config.flags import from_args
from quire.errors import RequestError
from quire.params import SamplingParams

HELP = "continue a text, without a chat template"
USAGE = "quire generate [flags] [--] PROMPT"

DEFAULT_TOKENS = 128


@dataclass(frozen=True)
class GenerateOptions:
    """The text"""

    prompt: str | None = knob(
        None, "the text to continue; - or nothing reads standard input", positional="?", metavar="PROMPT"
    )
    n: int = knob(1, "how many answers", low=1)


OPTIONS = (GenerateOptions, SamplingOptions, EngineConfig)


def run(args: Namespace) -> int:
    options = from_args(GenerateOptions, args)
    sampling = from_args(SamplingOptions, args)
    config = from_args(EngineConfig, args)
    text = options.prompt
    if text is None or text == "-":
        if sys.stdin.isatty():
            raise RequestError('there is nothing to continue: quire generate "Once upon a time"')
        text = sys.stdin.read().removesuffix("\n")  # what `echo` adds
    with LLM.from_config(config) as llm:
        params = sampling.params(llm.model, DEFAULT_TOKENS, seed=getattr(args, "seed", None))
        params.n = options.n
        if options.n == 1:
            _stream(llm, text, params)
        else:
            for choice in llm.generate(text, params)[0].outputs:
                print(f"--- {choice.index}\n{choice.text}")
    return 0


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    num_shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        print(text[num_shown:], end="", flush=True)
        num_shown = len(text)
    print()
