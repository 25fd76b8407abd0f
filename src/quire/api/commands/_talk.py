"""A conversation in the terminal, whoever answers: what `chat` and `run` share.

An answer arrives by a callback, piece by piece; where it comes from is the business of `local` and of `_remote.py`.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.api.llm import LLM
from quire.config import knob
from quire.errors import EngineError, RequestError
from quire.params import SamplingParams

COMMANDS = "/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer"

Messages = list[dict[str, str]]
Show = Callable[[str, bool, int], None]  # takes a piece of text, whether it is thinking, and its number of tokens
Answer = Callable[[Messages, Show], None]

# What moves the cursor, rings or talks to the terminal: an answer has no business there.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
_DIM, _PLAIN = "\033[2m", "\033[0m"


@dataclass(frozen=True)
class TalkOptions:
    """The conversation"""

    system: str | None = knob(None, "a system message to begin with", names=("--system-prompt",))

    @property
    def beginning(self) -> Messages:
        return [{"role": "system", "content": self.system}] if self.system else []


def local(llm: LLM, params: SamplingParams) -> Answer:
    """A model of this process answers."""

    def answer(messages: Messages, show: Show) -> None:
        num_shown = num_tokens = 0
        for output in llm.stream(llm.encode_chat(messages), params):
            choice = output.outputs[0]
            show(choice.text[num_shown:], False, len(choice.token_ids) - num_tokens)
            num_shown, num_tokens = len(choice.text), len(choice.token_ids)

    return answer


class Printer:
    """Prints an answer as it comes; `text` is what of it is to be remembered, without thinking."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.first_s: float | None = None
        self._for_people = sys.stdout.isatty()
        self._in_thought = False

    def __call__(self, text: str, is_thinking: bool, num_tokens: int) -> None:
        self.first_s = self.first_s or time.monotonic()
        self.num_tokens += num_tokens
        if not is_thinking:
            self.text += text
        if not self._for_people:
            print("" if is_thinking else text, end="", flush=True)  # whoever reads this wants the answer alone
            return
        mark = {(False, True): _DIM, (True, False): f"{_PLAIN}\n"}.get((self._in_thought, is_thinking), "")
        self._in_thought = is_thinking
        print(mark + text.translate(_CONTROLS), end="", flush=True)

    def end(self, started_s: float) -> None:
        if not self._for_people:
            print("\n")
            return
        took_s = max(time.monotonic() - (self.first_s or started_s), 1e-9)
        rate = (self.num_tokens - 1) / took_s if self.num_tokens > 1 else 0.0
        first_s = (self.first_s or started_s) - started_s
        told = f"{self.num_tokens} tokens, first after {first_s:.2f} s, then {rate:.0f} tok/s"
        print(f"{_PLAIN}\n{_DIM}[{told}]{_PLAIN}\n")


def converse(answer: Answer, beginning: Messages) -> None:
    """Until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing)
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
        if said in ("/exit", "/quit", "/bye"):
            return
        if said == "/help":
            print(COMMANDS)
        elif said in ("/reset", "/clear"):
            messages = list(beginning)
            print("(forgotten)")
        elif said:
            messages = _turn(answer, messages, said)


def _turn(answer: Answer, messages: Messages, said: str) -> Messages:
    """The conversation with this turn, unless there was no answer to keep."""
    asked = [*messages, {"role": "user", "content": said}]
    printer = Printer()
    started_s = time.monotonic()
    try:
        answer(asked, printer)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (RequestError, EngineError) as error:
        print(f"({error}; /reset starts anew)")
        return messages
    printer.end(started_s)
    return [*asked, {"role": "assistant", "content": printer.text}] if printer.text else messages
