"""Grammars for requests, without ever holding up the loop: submit a spec, look at its ticket later.

Owned by the core. A thread per worker sends specs to a process of its own (`trial.py`), which may be killed, and compiles here
only what that process proved: engines let other threads run while they compile. Must not know requests.
"""

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict

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
GRACE_S = 2.0  # beyond the time of a grammar, for the process that tries it to say so itself
# Libraries that start threads when they are loaded must not: a process with several cannot be copied.
ONE_THREAD = ["env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1", "MKL_NUM_THREADS=1"]
MAX_CACHED = 512
MAX_CACHED_BYTES = 512 << 20
MAX_WAITING = 1024


class Ticket:
    """What becomes of one submitted spec; `done` first, then exactly one of `grammar` and `error` is set."""

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
        self._tickets: OrderedDict[GrammarSpec, Ticket] = (
            OrderedDict()
        )  # in flight and cached; the least used come first
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._engines: dict[str, GrammarEngine] = {}
        self._workers = [_Worker(self) for _ in range(workers)]

    def submit(self, spec: GrammarSpec) -> Ticket:
        """Never waits. The same spec is compiled once, however many ask."""
        with self._lock:
            ticket = self._tickets.get(spec)
            if ticket is not None and ticket.grammar is not None and ticket.grammar.too_slow:
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
            total = sum(t.grammar.num_bytes for t in self._tickets.values() if t.grammar)
            for spec in [spec for spec, t in self._tickets.items() if t.done]:
                if len(self._tickets) <= MAX_CACHED and total <= MAX_CACHED_BYTES:
                    break
                dropped = self._tickets.pop(spec)  # requests that hold it keep it alive
                total -= dropped.grammar.num_bytes if dropped.grammar else 0


class _Worker:
    """A thread and its trial process."""

    def __init__(self, owner: Compiler) -> None:
        self._owner = owner
        self._process: subprocess.Popen | None = None
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
            grammar, error = None, RequestError("the grammar could not be compiled.")
            try:
                grammar, error = self._work(ticket.spec), None
            except RequestError as refused:
                error = refused
            except BaseException:  # whatever it is, the thread goes on and the ticket gets an answer
                logger.exception("compiling a grammar failed")
            self._owner._settle(ticket, grammar, error)

    def _work(self, spec: GrammarSpec) -> Grammar:
        lowered = self._try(spec)
        if lowered.error or lowered.spec is None:
            raise RequestError(lowered.error)
        return self._owner._engine(lowered.engine).compile_lowered(lowered.spec)

    def _try(self, spec: GrammarSpec) -> Lowered:
        if self._process is None:
            self._start()
        process, timeout_s = self._process, self._owner._setup.timeout_s
        watchdog = threading.Timer(
            longest_wait(timeout_s) + GRACE_S, process.kill
        )  # it kills its own child before that
        watchdog.start()
        try:
            send(process.stdin, spec)
            return receive(process.stdout, Lowered)
        except BaseException as error:
            self._kill()  # what it says next may be about another spec
            if not isinstance(error, (EOFError, OSError, ValueError)):
                raise
            raise RequestError(
                f"the {spec.kind} is too complex: it needs more time ({timeout_s:g} s) or memory than allowed."
            ) from None
        finally:
            watchdog.cancel()

    def _start(self) -> None:
        """Takes seconds: the engines' imports, there and here at once. Meanwhile specs wait in the queue."""
        command = [*ONE_THREAD, sys.executable, "-m", "quire.structured.running.trial", str(os.getpid())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = process = subprocess.Popen(command, **pipes)
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            send(process.stdin, self._owner._setup)
            for kind in engines(self._owner._setup.engine):
                self._owner._engine(kind.name)
            receive(process.stdout, Lowered)
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
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not written yet is for nobody
                pipe.close()
