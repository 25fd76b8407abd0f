"""The process in which a grammar from a client is compiled and tried first: its memory and time are limited.

Started by `compiler.py`, which sends specs and reads the results over pipes. Loading the engines takes seconds, so the
process that does it never touches a grammar: it forks a child for that, and forks another at once when the child dies.
The compiled grammar is not sent back (that costs more than compiling again): only the lowered text, which is then known
to compile, and to be followed in time.
"""

import gc
import os
import re
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

import msgspec
import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import SLOW_S, Grammar, GrammarEngine
from quire.structured.errors import PatternError
from quire.structured.spec import GrammarSpec, is_lark
from quire.utils.child import end_with_parent

MEMORY_BYTES = 4 << 30  # beyond what the libraries take when they are loaded
# The share of a core that a child gets at least, on a busy machine. Time limits are in CPU time, and a child that
# stands still uses none: this turns them into a limit on the clock.
SLOWEST_SHARE = 0.25
GRACE_S = 0.5  # added to that limit, for sending and receiving
WALK_TOKENS = 48  # length of the output that is tried
LOOK_EVERY = 8  # after so many tokens the calls are tried that the core makes now and then
FAR = 32  # a count above this is long
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


def engines(name: str) -> list[type[GrammarEngine]]:
    """Those to try, in order."""
    from quire.structured.engines.llguidance import LLGuidance
    from quire.structured.engines.xgrammar import XGrammar

    both: list[type[GrammarEngine]] = [XGrammar, LLGuidance]
    return both if name == "auto" else [kind for kind in both if kind.name == name]


def send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes], kind: type) -> Any:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(_LENGTH.unpack(header)[0]), type=kind)


class Trial:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.vocabulary = setup.vocabulary
        self.engines = {kind.name: kind(setup.vocabulary) for kind in engines(setup.engine)}

    def run(self, spec: GrammarSpec) -> Lowered:
        started = time.process_time()
        refusal: RequestError | None = None  # the one to report
        in_order = list(self.engines.values())
        preferred = in_order[0]
        if _counts_far(spec):
            in_order.reverse()
        for engine in in_order:
            try:
                if engine is not preferred and not _may_follow(spec, refusal):
                    break
                lowered = engine.lower(spec, "" if self._setup.compact and spec.blanks is None else spec.blanks)
                self._try(engine.compile_lowered(lowered))
                return Lowered(engine.name, lowered, seconds=time.process_time() - started)
            except RequestError as error:
                says_more = isinstance(refusal, PatternError) or spec.kind == "grammar"
                if refusal is None or says_more:
                    refusal = error
            except (MemoryError, RecursionError):
                refusal = RequestError(f"the {spec.kind} is too complex: simplify it.")
            except Exception:  # whatever it is, it is about this spec
                refusal = RequestError(f"the {spec.kind} could not be compiled: simplify it.")
        return Lowered(error=str(refusal))

    def _try(self, grammar: Grammar) -> None:
        """Generates some tokens with every call the core makes: an output must be possible, and no call may be slow."""
        matcher = grammar.matcher()
        random = numpy.random.default_rng(0)
        masks = numpy.zeros((1, self._setup.vocabulary.num_words), dtype=numpy.int32)
        for position in range(WALK_TOKENS):
            if not _timed(matcher.fill, masks[0]):
                raise RequestError("the grammar allows no output: nothing can be generated from it.")
            allowed = numpy.flatnonzero(numpy.unpackbits(masks.view(numpy.uint8), bitorder="little"))
            token_id = int(random.choice(allowed))
            if position % LOOK_EVERY == 0:
                _timed(lambda: matcher.is_complete)
                _timed(matcher.forced)
                _timed(type(matcher).fill_all, [matcher], masks, [0])
                if not _timed(type(matcher).accept_all, [matcher], [token_id]):
                    _timed(matcher.rollback, 1)
            _timed(matcher.accept, token_id)
            if matcher.terminated:
                break


def _timed(call: Callable[..., Any], *args: Any) -> Any:
    started = time.process_time()
    result = call(*args)
    if time.process_time() - started > 5 * SLOW_S:
        raise RequestError("the grammar is too slow to follow: lower its repetition counts.")
    return result


def _counts_far(spec: GrammarSpec) -> bool:
    """Whether long runs of characters are counted: xgrammar computes masks for all positions, llguidance as needed."""
    return spec.kind in ("json", "regex", "gbnf") and any(int(digits) > FAR for digits in _COUNTS.findall(spec.text))


def _may_follow(spec: GrammarSpec, refusal: RequestError | None) -> bool:
    """Whether the next engine may be tried: only if the first one lacks a syntax, never if it found a contradiction."""
    is_about_syntax = isinstance(refusal, PatternError) or (spec.kind == "grammar" and is_lark(spec.text))
    return refusal is None or is_about_syntax


def longest_wait(cpu_s: float) -> float:
    """Seconds on the clock after which a process that may use `cpu_s` of CPU time must hang, on a busy machine too."""
    return cpu_s / SLOWEST_SHARE + GRACE_S


class Child:
    """The process that works on grammars, a fork of this one; it is replaced when it dies or hangs."""

    def __init__(self, trial: Trial, timeout_s: float) -> None:
        self._trial, self._timeout_s = trial, timeout_s
        self._start()

    def ask(self, spec: GrammarSpec) -> Lowered:
        try:
            send(self._specs, spec)
            has_answered = bool(select.select([self._results], [], [], longest_wait(self._timeout_s))[0])
            if not has_answered:
                raise EOFError
            return receive(self._results, Lowered)
        except (EOFError, OSError, msgspec.DecodeError):
            self.end()
            self._start()
            needs = f"it needs more time ({self._timeout_s:g} s) or memory than allowed"
            return Lowered(error=f"the {spec.kind} is too complex: {needs}.")

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for pipe in (self._specs, self._results):
            pipe.raw.close()  # without writing what is still in the buffer

    def _start(self) -> None:
        read_spec, write_spec = os.pipe()
        read_result, write_result = os.pipe()
        parent_pid = os.getpid()
        self._pid = os.fork()  # safe: this process has one thread
        if self._pid == 0:
            os.close(write_spec)
            os.close(read_result)
            end_with_parent(parent_pid)
            self._serve(os.fdopen(read_spec, "rb"), os.fdopen(write_result, "wb"))
        os.close(read_spec)
        os.close(write_result)
        self._specs = os.fdopen(write_spec, "wb")
        self._results = os.fdopen(read_result, "rb")

    def _serve(self, specs: IO[bytes], results: IO[bytes]) -> NoReturn:
        status = 1
        try:
            _limit_memory()
            while True:
                spec = receive(specs, GrammarSpec)
                signal.setitimer(signal.ITIMER_PROF, self._timeout_s)  # ends the process, whatever it is doing
                result = self._trial.run(spec)
                signal.setitimer(signal.ITIMER_PROF, 0)
                try:
                    send(results, result)
                except UnicodeEncodeError:
                    send(results, Lowered(error=f"the {spec.kind} holds a lone surrogate (half of a UTF-16 pair)."))
        except EOFError:
            status = 0
        finally:
            os._exit(status)  # without cleaning up what belongs to the parent


def _limit_memory() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    end_with_parent(int(sys.argv[1]))
    specs, results = sys.stdin.buffer, sys.stdout.buffer
    setup = receive(specs, Setup)
    trial = Trial(setup)
    gc.freeze()  # the child shares the memory of what is loaded: the garbage collector must not write to it
    child = Child(trial, setup.timeout_s)
    send(results, Lowered())  # ready
    while True:
        try:
            spec = receive(specs, GrammarSpec)
        except EOFError:
            return child.end()
        send(results, child.ask(spec))


if __name__ == "__main__":
    main()
