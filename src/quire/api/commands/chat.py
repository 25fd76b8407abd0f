"""`quire chat`: a conversation in the terminal, streaming.

Ctrl-C stops an answer, Ctrl-D or /exit ends the chat; see /help.
"""

import contextlib
import sys
import time
from argparse import Namespace
from dataclasses import dataclass

from quire.api.commands._sampling import SamplingOptions
from quire.api.llm import LLM
from quire.config import EngineConfig, knob
from quire.config.flags import from_args
from quire.errors import RequestError
from quire.params import SamplingParams

HELP = "chat with a model in the terminal"
USAGE = "quire chat [flags]"

COMMANDS = "/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer"


@dataclass(frozen=True)
class ChatOptions:
    """The conversation"""

    system: str | None = knob(None, "a system message to begin with")


OPTIONS = (ChatOptions, SamplingOptions, EngineConfig)


def run(args: Namespace) -> int:
    options = from_args(ChatOptions, args)
    sampling = from_args(SamplingOptions, args)
    config = from_args(EngineConfig, args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing)
    print(f"Starting {config.model.model} …", file=sys.stderr)
    started = time.monotonic()
    with LLM.from_config(config) as llm:
        print(f"Ready in {time.monotonic() - started:.1f} s. {COMMANDS}.\n", file=sys.stderr)
        params = sampling.params(llm.model, None, seed=getattr(args, "seed", None), chat=True)
        beginning = [{"role": "system", "content": options.system}] if options.system else []
        _converse(llm, params, beginning)
    return 0


def _converse(llm: LLM, params: SamplingParams, beginning: list[dict]) -> None:
    messages = list(beginning)
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D to leave)")
            continue
        if said in ("/exit", "/quit"):
            return
        if said == "/help":
            print(COMMANDS)
        elif said == "/reset":
            messages = list(beginning)
            print("(forgotten)")
        elif said:
            answer = _answer(llm, params, [*messages, {"role": "user", "content": said}])
            if answer is not None:
                messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, params: SamplingParams, messages: list[dict]) -> str | None:
    """Prints the answer as it comes; None when there was none to keep."""
    text = ""
    num_tokens = 0
    started = time.monotonic()
    first: float | None = None  # when the first token came
    try:
        for output in llm.stream(llm.encode_chat(messages), params):
            choice = output.outputs[0]
            print(choice.text[len(text) :], end="", flush=True)
            text = choice.text
            num_tokens = len(choice.token_ids)
            first = first or time.monotonic()
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"({error}; /reset starts anew)")
        return None
    rate = (num_tokens - 1) / max(time.monotonic() - first, 1e-9) if first and num_tokens > 1 else 0.0
    first_s = (first or started) - started
    if sys.stdout.isatty():
        print(f"\n\033[2m[{num_tokens} tokens, first after {first_s:.2f} s, then {rate:.0f} tok/s]\033[0m\n")
    else:
        print("\n")
    return text or None
