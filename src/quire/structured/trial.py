"""The process where a stranger's grammar is worked on first: it has a memory limit and an alarm clock, and may die.

Started by `compiler.py`, which sends specs and reads what they became over pipes. Nothing compiled comes back (sending that costs
more than compiling again): only the lowered text, proved to compile and to fill masks in reasonable time.
"""

import re
import resource
import signal
import struct
import sys
import time
from typing import BinaryIO

import msgspec
import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.base import SLOW_FILL_S, Engine, Grammar
from quire.structured.errors import PatternError
from quire.structured.spec import GrammarSpec, is_lark

MEMORY_BYTES = 4 << 30  # beyond what the libraries take when they are loaded
WALK_TOKENS = 48
FAR = 32
_COUNTS = re.compile(r'(?:"(?:max|min)Length"\s*:\s*|\{(?:\d{1,9},)?)(\d{1,9})')
_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct):
    engine: str
    vocabulary: Vocabulary
    timeout_s: float
    compact: bool = False


class Lowered(msgspec.Struct):
    """What became of a spec; `error` is for the person who sent it."""

    engine: str = ""
    spec: GrammarSpec | None = None
    error: str = ""
    seconds: float = 0.0


def engines(name: str) -> list[type[Engine]]:
    """Those to try, in order."""
    from quire.structured.llguidance import LLGuidance
    from quire.structured.xgrammar import XGrammar

    return {"auto": [XGrammar, LLGuidance], "xgrammar": [XGrammar], "llguidance": [LLGuidance]}[name]


def send(pipe: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO, kind: type):
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(_LENGTH.unpack(header)[0]), type=kind)


class Trial:
    def __init__(self, setup: Setup) -> None:
        self._setup, self.vocabulary = setup, setup.vocabulary
        self.engines = {kind.name: kind(setup.vocabulary) for kind in engines(setup.engine)}

    def run(self, spec: GrammarSpec) -> Lowered:
        started = time.perf_counter()
        first: RequestError | None = None
        in_order = list(self.engines.values())
        preferred = in_order[0]
        if _counts_far(spec):
            in_order.reverse()
        for engine in in_order:
            try:
                if first is not None and engine is not preferred and not _may_follow(spec, first):
                    break
                lowered = engine.lower(spec, self._setup.compact)
                self._prove(engine.compile_lowered(lowered))
                return Lowered(engine.name, lowered, seconds=time.perf_counter() - started)
            except RequestError as error:
                first = error if first is None or isinstance(first, PatternError) or spec.kind == "grammar" else first
            except (MemoryError, RecursionError):
                first = RequestError(f"the {spec.kind} is too complex: simplify it.")
        return Lowered(error=str(first))

    def _prove(self, grammar: Grammar) -> None:
        """Walks a little way into the grammar: something must be possible, and not take for ever."""
        matcher, random = grammar.matcher(), numpy.random.default_rng(0)
        mask = numpy.zeros(self._setup.vocabulary.num_words, dtype=numpy.int32)
        for _ in range(WALK_TOKENS):
            started = time.perf_counter()
            if not matcher.fill(mask):
                raise RequestError("the grammar allows no output: nothing can be generated from it.")
            if time.perf_counter() - started > 5 * SLOW_FILL_S:
                raise RequestError("the grammar is too slow to follow: lower its repetition counts.")
            allowed = numpy.flatnonzero(numpy.unpackbits(mask.view(numpy.uint8), bitorder="little"))
            matcher.accept(int(random.choice(allowed)))
            if matcher.terminated:
                break


def _counts_far(spec: GrammarSpec) -> bool:
    """Long counts of characters: xgrammar works out a mask for each, llguidance only for those that are reached."""
    return spec.kind in ("json", "regex") and any(int(digits) > FAR for digits in _COUNTS.findall(spec.text))


def _may_follow(spec: GrammarSpec, error: RequestError) -> bool:
    """Whether the next engine may be asked: only where the first one lacks a syntax, never where it found a contradiction."""
    return isinstance(error, PatternError) or (spec.kind == "grammar" and is_lark(spec.text))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    inward, outward = sys.stdin.buffer, sys.stdout.buffer
    setup = receive(inward, Setup)
    trial = Trial(setup)
    pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    send(outward, Lowered())  # ready
    while True:
        try:
            spec = receive(inward, GrammarSpec)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s)  # its default action ends the process, whatever it is doing
        result = trial.run(spec)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(outward, result)


if __name__ == "__main__":
    main()
