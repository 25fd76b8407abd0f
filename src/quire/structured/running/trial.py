"""The process where a stranger's grammar is worked on first: it has a memory limit and an alarm clock, and may die.

Started by `compiler.py`, which sends specs and reads what they became over pipes. Loading the engines takes seconds,
so the process that does it never touches a grammar: a child of it does, and when that dies there is another at once.
Nothing compiled comes back (sending that costs more than compiling again): only the lowered text, proved to compile
and to be followed in time.
"""

import ctypes
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
from typing import Any, BinaryIO, NoReturn

import msgspec
import numpy

from quire.errors import RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import SLOW_S, Grammar, GrammarEngine
from quire.structured.errors import PatternError
from quire.structured.spec import GrammarSpec, is_lark

MEMORY_BYTES = 4 << 30  # beyond what the libraries take when they are loaded
SLOWEST_SHARE = (
    0.25  # of a core that a child gets on a busy machine: time limits are in CPU time, one that stands still uses none
)
GRACE_S = 0.5  # beyond that, for what stands around it
WALK_TOKENS = 48
LOOK_EVERY = 8  # tokens of the walk: there the calls are made that the core makes now and then
FAR = 32
_COUNTS = re.compile(r'(?:"(?:max|min)Length"\s*:\s*|\{(?:\d{1,9},)?)(\d{1,9})')
_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


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

    return {"auto": [XGrammar, LLGuidance], "xgrammar": [XGrammar], "llguidance": [LLGuidance]}[name]


def send(pipe: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO, kind: type) -> Any:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(_LENGTH.unpack(header)[0]), type=kind)


class Trial:
    def __init__(self, setup: Setup) -> None:
        self._setup, self.vocabulary = setup, setup.vocabulary
        self.engines = {kind.name: kind(setup.vocabulary) for kind in engines(setup.engine)}

    def run(self, spec: GrammarSpec) -> Lowered:
        started = time.process_time()
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
                return Lowered(engine.name, lowered, seconds=time.process_time() - started)
            except RequestError as error:
                first = error if first is None or isinstance(first, PatternError) or spec.kind == "grammar" else first
            except (MemoryError, RecursionError):
                first = RequestError(f"the {spec.kind} is too complex: simplify it.")
            except Exception:  # whatever it is, it is about this spec
                first = RequestError(f"the {spec.kind} could not be compiled: simplify it.")
        return Lowered(error=str(first))

    def _prove(self, grammar: Grammar) -> None:
        """Walks a little way into the grammar with every call the core makes: some output must be possible, in time."""
        matcher, random = grammar.matcher(), numpy.random.default_rng(0)
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
    """Long counts of characters: xgrammar works out a mask for each, llguidance only for those that are reached."""
    return spec.kind in ("json", "regex") and any(int(digits) > FAR for digits in _COUNTS.findall(spec.text))


def _may_follow(spec: GrammarSpec, error: RequestError) -> bool:
    """Whether the next engine may be asked: only where the first one lacks a syntax, never where it found a contradiction."""
    return isinstance(error, PatternError) or (spec.kind == "grammar" and is_lark(spec.text))


def longest_wait(cpu_s: float) -> float:
    """Seconds after which a process that may use `cpu_s` of CPU time stands still, however busy the machine is."""
    return cpu_s / SLOWEST_SHARE + GRACE_S


class Child:
    """The process that works on grammars, a copy of this one; another takes its place when it dies or stands still."""

    def __init__(self, trial: Trial, timeout_s: float) -> None:
        self._trial, self._timeout_s = trial, timeout_s
        self._start()

    def ask(self, spec: GrammarSpec) -> Lowered:
        try:
            send(self._to, spec)
            if not select.select([self._from], [], [], longest_wait(self._timeout_s))[0]:
                raise EOFError
            return receive(self._from, Lowered)
        except (EOFError, OSError, msgspec.DecodeError):
            self.end()
            self._start()
            needs = f"it needs more time ({self._timeout_s:g} s) or memory than allowed"
            return Lowered(error=f"the {spec.kind} is too complex: {needs}.")

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for pipe in (self._to, self._from):
            pipe.raw.close()  # what is not written yet is for nobody

    def _start(self) -> None:
        (read_spec, write_spec), (read_result, write_result) = os.pipe(), os.pipe()
        parent_pid = os.getpid()
        self._pid = os.fork()  # safe: this process has one thread
        if self._pid == 0:
            os.close(write_spec), os.close(read_result)
            end_with_parent(parent_pid)
            self._serve(os.fdopen(read_spec, "rb"), os.fdopen(write_result, "wb"))
        os.close(read_spec), os.close(write_result)
        self._to, self._from = os.fdopen(write_spec, "wb"), os.fdopen(read_result, "rb")

    def _serve(self, inward: BinaryIO, outward: BinaryIO) -> NoReturn:
        status = 1
        try:
            _limit_memory()
            while True:
                spec = receive(inward, GrammarSpec)
                signal.setitimer(signal.ITIMER_PROF, self._timeout_s)  # ends the process, whatever it is doing
                result = self._trial.run(spec)
                signal.setitimer(signal.ITIMER_PROF, 0)
                try:
                    send(outward, result)
                except UnicodeEncodeError:
                    send(outward, Lowered(error=f"the {spec.kind} holds a lone surrogate (half of a UTF-16 pair)."))
        except EOFError:
            status = 0
        finally:
            os._exit(status)  # nothing of the parent's is this process's to clean up


def end_with_parent(parent_pid: int) -> None:
    """The kernel sees to it, also when this process is busy or stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it was faster
            os._exit(1)


def _limit_memory() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    end_with_parent(int(sys.argv[1]))
    inward, outward = sys.stdin.buffer, sys.stdout.buffer
    setup = receive(inward, Setup)
    trial = Trial(setup)
    gc.freeze()  # the child shares what is loaded
    child = Child(trial, setup.timeout_s)
    send(outward, Lowered())  # ready
    while True:
        try:
            spec = receive(inward, GrammarSpec)
        except EOFError:
            return child.end()
        send(outward, child.ask(spec))


if __name__ == "__main__":
    main()
