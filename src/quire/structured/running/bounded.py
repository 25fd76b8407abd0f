"""Calls into grammar libraries that may take for ever: threads make them, the core waits a moment, then goes on.

Used by guides and masks for whatever they ask of a matcher. A call cannot be stopped, only left alone. Libraries let
go of Python's lock in those that may take long, so the core can go on; the call's thread gets a low priority and ends
with it. Until then nobody may touch what the call works on, and what it writes late must reach nobody.
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

LIMIT_S = 0.5  # of processor time, for one call
MIN_LIMIT_S = 0.1  # the more calls were left alone and still run, the less is waited for the next
PATIENCE = 10  # how many times that may pass on the clock: the machine may be busy with other things
LOW_PRIORITY = 19  # not the kernel's idle class: they would keep Python's lock too long when they end
MAX_STUCK = 8  # calls left alone and still running: beyond that no new grammar is taken

_idle: deque["_Worker"] = deque()
_stuck: set["_Worker"] = set()


class TooSlowError(Exception):
    """A call was left alone."""


class Job:
    """Functions that a thread runs in order."""

    def __init__(self, parts: Sequence[Callable[[], Any]], limit_s: float = LIMIT_S) -> None:
        self.seconds = 0.0  # that the longest part took
        self.result: Any = None  # of the last part
        self.error: Exception | None = None  # of the last part that raised one
        self._parts, self._limit_s = parts, limit_s
        self._lock = Lock()
        self._at, self._since = 0, float("inf")  # the part that runs, and its thread's processor time when it began
        self._is_left = self._is_over = False
        self._begun, self._done = Lock(), Lock()
        self._begun.acquire(), self._done.acquire()
        try:
            self._worker = _idle.pop()
        except IndexError:
            self._worker = _Worker()
        self._worker.jobs.put(self)

    def wait_begun(self) -> None:
        """A thread that has not begun would wait for Python's lock until this one rests."""
        self._begun.acquire()

    def wait(self) -> list[int]:
        """Until all is done; the parts that were left alone because they take too long."""
        limit_s = max(MIN_LIMIT_S, self._limit_s / (1 + len(_stuck)))
        deadline = time.monotonic() + PATIENCE * limit_s
        while not self._done.acquire(timeout=limit_s):
            with self._lock:
                if self._is_over:
                    continue
                is_late = self._worker.processor_s() - self._since >= limit_s or time.monotonic() > deadline
                if not is_late:
                    continue
                self._is_left = True
            return self._go_on_after_stuck()
        return []

    def _go_on_after_stuck(self) -> list[int]:
        stuck = self._at
        self._worker.leave()
        self.seconds = max(self.seconds, self._limit_s)
        if not self._parts[stuck + 1 :]:
            return [stuck]
        rest = Job(self._parts[stuck + 1 :], self._limit_s)
        more = [stuck + 1 + idx for idx in rest.wait()]
        self.result, self.error = rest.result, rest.error or self.error
        return [stuck, *more]

    def run(self) -> bool:
        """In the thread: False when nobody waits for it any more."""
        self._begun.release()
        for idx, part in enumerate(self._parts):
            with self._lock:
                if self._is_left:
                    return False
                self._at, self._since = idx, time.thread_time()
            started = time.perf_counter()
            try:
                self.result = part()
            except Exception as error:
                self.error = error
            self.seconds = max(self.seconds, time.perf_counter() - started)
        with self._lock:
            self._is_over = not self._is_left
        return self._is_over

    def finish(self) -> None:
        self._done.release()


class _Worker:
    """A thread that runs one job after the other, until it is left alone with one."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="grammar-calls", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None and job.run():
            _idle.append(self)
            job.finish()
            del job  # it holds matchers
        _stuck.discard(self)

    def leave(self) -> None:
        _stuck.add(self)
        if not self._thread.is_alive():
            _stuck.discard(self)
        if sys.platform == "linux":  # elsewhere threads have no priority of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, LOW_PRIORITY)

    def processor_s(self) -> float:
        with contextlib.suppress(AttributeError, OSError):
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return float("inf")  # where nobody can tell


def call(function: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What the function returns, or TooSlowError."""
    job = Job([function], limit_s)
    if job.wait():
        raise TooSlowError
    if job.error is not None:
        raise job.error
    return job.result


def num_stuck() -> int:
    return len(_stuck)


def close() -> None:
    """Threads without work end; a later call starts others."""
    with contextlib.suppress(IndexError):
        while True:
            _idle.pop().jobs.put(None)
