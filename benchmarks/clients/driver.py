"""What every client's driver shares: where the servers are, checks that have names, and no way to any other machine.

Imported by the `run_*.py` scripts beside it, inside each client's own environment, where Quire is not installed.
Standard library only; must not know any client.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Read when clients are imported. Without these, some would ask other machines for tokenizers or prices.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    api_key: str
    max_model_len: int

    @property
    def base_url(self) -> str:
        """As OpenAI's clients want it."""
        return self.url + "/v1"

    @property
    def too_long(self) -> str:
        """A prompt that has more tokens than the context."""
        return "word " * (self.max_model_len + 100)


@dataclass(frozen=True)
class Setting:
    """Two servers of one model: `long` has the model's own context and wants a key, `short` is open to all."""

    long: Server
    short: Server
    tokenizer: Path  # of the model, as a Hugging Face folder


Check = Callable[[Setting], None]
_checks: list[tuple[str, Check]] = []
_strangers: list[str] = []  # hosts that were asked for and are not ours


class Failed(Exception):
    """A client's answer is not what it should be; the message says what was there instead."""


def check(name: str) -> Callable[[Check], Check]:
    """Makes a function one of the checks of `main`."""

    def add(function: Check) -> Check:
        _checks.append((name, function))
        return function

    return add


def expect(holds: object, found: object) -> None:
    if not holds:
        raise Failed(f"found {found!r:.400}")


def expect_raises(kind: type[Exception], ask: Callable[[], object], says: str = "") -> Exception:
    """The error of that kind which `ask` ends with."""
    try:
        answer = ask()
    except kind as error:
        expect(says in str(error), str(error))
        return error
    raise Failed(f"no {kind.__name__} but {answer!r:.200}")


def _stay_here(event: str, arguments: tuple) -> None:
    """An audit hook: sockets reach this machine only. Others are remembered, since a client may go on without them."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", "localhost", "127.0.0.1", "::1"):
        _strangers.append(host)
        raise ConnectionRefusedError(f"{host} is not this machine")


sys.addaudithook(_stay_here)


@check("asked no other machine for anything")
def no_strangers(setting: Setting) -> None:
    expect(not _strangers, sorted(set(_strangers)))


def main(client: str) -> None:
    """Runs all checks, a line each; exit status 1 when one failed."""
    parser = argparse.ArgumentParser(description=f"Checks of {client} against two servers.")
    parser.add_argument("--long", required=True, help="JSON, as Server")
    parser.add_argument("--short", required=True, help="JSON, as Server")
    parser.add_argument("--tokenizer", required=True, type=Path, help="a Hugging Face folder")
    args = parser.parse_args()
    setting = Setting(Server(**json.loads(args.long)), Server(**json.loads(args.short)), args.tokenizer)
    has_failed = False
    for name, function in [*_checks[1:], _checks[0]]:  # the one of this file last
        try:
            function(setting)
            verdict = "ok"
        except Exception as error:
            has_failed = True
            verdict = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        print(f"{client:<16}  {name:<75}  {verdict}", flush=True)
    sys.exit(1 if has_failed else 0)
