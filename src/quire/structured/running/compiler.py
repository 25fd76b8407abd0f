"""Compiles grammars for requests without making the core's loop wait: submit a spec, look at its ticket later.

Owned by the core. A thread per worker sends specs to a process of its own (`trial.py`), which may be killed, and
compiles here only what that process compiled and tried: engines let other threads run while they compile. Must not know
requests.
"""

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import IO

from quire.errors import ConfigError, RequestError
from quire.messages import Vocabulary
from quire.structured.engines.base import Grammar, GrammarEngine
from quire.structured.running import bounded
from quire.structured.running.guide import TOO_SLOW
from quire.structured.running.trial import Lowered, Setup, engines, longest_wait, receive, send
from quire.structured.spec import GrammarSpec

logger = logging.getLogger(__name__)

ENGINES = ("auto", "xgrammar", "llguidance")
TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0  # importing the engines, on a busy machine
GRACE_S = 2.0  # how much longer the trial process gets: it ends a grammar that takes too long itself
# Keeps libraries from starting threads when they are loaded: a process with several threads cannot be forked safely.
ONE_THREAD = ["env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1", "MKL_NUM_THREADS=1"]
MAX_CACHED = 512
MAX_CACHED_BYTES = 512 << 20
MAX_WAITING = 1024


class Ticket:
    """What becomes of one submitted spec; once `done`, exactly one of `grammar` and `error` is set."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.grammar: Grammar | None = None
        self.error: RequestError | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._done.wait(timeout_s)

    def _finish(self, grammar: Grammar | None, error: RequestError | None) -> None:
        self.grammar, self.error = grammar, error
        self._done.set()


def _refused(spec: GrammarSpec, why: str) -> Ticket:
    ticket = Ticket(spec)
    ticket._finish(None, RequestError(why))
    return ticket


class Compiler:
    def __init__(
        self, engine: str, vocabulary: Vocabulary, workers: int = 1, timeout_s: float = TIMEOUT_S, compact: bool = False
    ) -> None:
        if engine not in ENGINES:
            raise ConfigError(f"grammar engine {engine!r} is unknown: use one of {', '.join(ENGINES)}.")
        self._setup = Setup(engine, vocabulary, timeout_s, compact)
        self._lock = threading.Lock()
        # In flight and cached, the least recently used first.
        self._tickets: OrderedDict[GrammarSpec, Ticket] = OrderedDict()
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._engines: dict[str, GrammarEngine] = {}
        self._workers = [_Worker(self) for _ in range(workers)]

    def submit(self, spec: GrammarSpec) -> Ticket:
        """Never waits. The same spec is compiled once, however many ask."""
        with self._lock:
            ticket = self._tickets.get(spec)
            grammar = ticket.grammar if ticket is not None else None
            if grammar is not None and grammar.too_slow:
                return _refused(spec, f"{TOO_SLOW}.")
            if ticket is None:
                if self._queue.qsize() >= MAX_WAITING:
                    return _refused(spec, "too many grammars wait to be compiled: try again later.")
                if bounded.num_stuck() >= bounded.MAX_STUCK:
                    return _refused(spec, "too many grammars take too long to follow: try again later.")
                ticket = Ticket(spec)
                self._tickets[spec] = ticket
                self._queue.put(ticket)
            self._tickets.move_to_end(spec)
        return ticket

    def close(self) -> None:
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.stop()

    def _engine(self, name: str) -> GrammarEngine:
        with self._lock:
            if name not in self._engines:
                kind = next(kind for kind in engines("auto") if kind.name == name)
                self._engines[name] = kind(self._setup.vocabulary)
            return self._engines[name]

    def _settle(self, ticket: Ticket, grammar: Grammar | None, error: RequestError | None) -> None:
        ticket._finish(grammar, error)
        with self._lock:
            total = sum(cached.grammar.num_bytes for cached in self._tickets.values() if cached.grammar)
            droppable = [spec for spec, cached in self._tickets.items() if cached.done]
            for spec in droppable:
                if len(self._tickets) <= MAX_CACHED and total <= MAX_CACHED_BYTES:
                    break
                dropped = self._tickets.pop(spec)  # requests that hold it keep it alive
                total -= dropped.grammar.num_bytes if dropped.grammar else 0


class _Worker:
    """A thread and its trial process."""

    def __init__(self, owner: Compiler) -> None:
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._thread.join(timeout=5)
        self._kill()

    def _run(self) -> None:
        try:
            self._start()
        except RequestError:
            pass  # logged; tried again for the next spec
        except BaseException:
            logger.exception("the grammar engines cannot be loaded")
        while (ticket := self._owner._queue.get()) is not None:
            grammar: Grammar | None = None
            error: RequestError | None = None
            try:
                grammar = self._compile(ticket.spec)
            except RequestError as refused:
                error = refused
            except BaseException:  # whatever it is, the thread goes on and the ticket gets an answer
                logger.exception("compiling a grammar failed")
                error = RequestError("the grammar could not be compiled.")
            self._owner._settle(ticket, grammar, error)

    def _compile(self, spec: GrammarSpec) -> Grammar:
        lowered = self._try(spec)
        if lowered.error or lowered.spec is None:
            raise RequestError(lowered.error)
        return self._owner._engine(lowered.engine).compile_lowered(lowered.spec)

    def _try(self, spec: GrammarSpec) -> Lowered:
        process = self._process or self._start()
        specs, results = _pipes(process)
        timeout_s = self._owner._setup.timeout_s
        # Only if the process itself hangs: it kills its own child before that.
        watchdog = threading.Timer(longest_wait(timeout_s) + GRACE_S, process.kill)
        watchdog.start()
        try:
            send(specs, spec)
            return receive(results, Lowered)
        except BaseException as error:
            self._kill()  # its next message could be the answer to this spec, taken for that of another
            if not isinstance(error, (EOFError, OSError, ValueError)):
                raise
            raise RequestError(
                f"the {spec.kind} is too complex: it needs more time ({timeout_s:g} s) or memory than allowed."
            ) from None
        finally:
            watchdog.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        """Takes seconds: the process and this one import the engines at the same time. Specs wait in the queue."""
        command = [*ONE_THREAD, sys.executable, "-m", "quire.structured.running.trial", str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = process
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            specs, results = _pipes(process)
            send(specs, self._owner._setup)
            for kind in engines(self._owner._setup.engine):
                self._owner._engine(kind.name)
            receive(results, Lowered)
            return process
        except BaseException as error:
            self._kill()
            if not isinstance(error, (EOFError, OSError)):
                raise
            logger.error("the process that tries grammars did not start")
            raise RequestError("grammars cannot be compiled: the process that tries them did not start.") from None
        finally:
            watchdog.cancel()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in _pipes(process):
            with contextlib.suppress(OSError):  # closing tries to write what was not written yet
                pipe.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard input and output."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process was started without pipes")
    return process.stdin, process.stdout
