"""Calls into grammar libraries that may never return: threads make them, and the core waits for a limited time.

Used by guides and masks for every call on a matcher. A call cannot be stopped, only abandoned. Libraries release
Python's lock in calls that may take long, so the core can go on; the call's thread gets a low priority and ends with
it. Until then no other code may touch what the call works on, and what it writes late must not be read.
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
MIN_LIMIT_S = 0.1  # the limit shrinks to this the more abandoned calls still run
PATIENCE = 10  # how many times the limit may pass on the clock: the machine may be busy with other things
LOW_PRIORITY = 19  # not the kernel's idle class: such threads would hold Python's lock too long when their call ends
MAX_STUCK = 8  # abandoned calls that still run: with so many, no new grammar is taken

_idle: deque["_Worker"] = deque()
_stuck: set["_Worker"] = set()


class TooSlowError(Exception):
    """A call was abandoned."""


class Job:
    """Functions that a thread runs in order."""

    def __init__(self, parts: Sequence[Callable[[], Any]], limit_s: float = LIMIT_S) -> None:
        self.seconds = 0.0  # that the longest part took
        self.result: Any = None  # of the last part
        self.error: Exception | None = None  # of the last part that raised one
        self._parts = parts
        self._limit_s = limit_s
        self._lock = Lock()
        self._part_idx = 0  # the part that runs
        self._part_started_s = float("inf")  # its thread's processor time when it began
        self._is_abandoned = False
        self._is_over = False
        self._begun = Lock()  # held until the thread has begun
        self._begun.acquire()
        self._done = Lock()  # held until all parts are done
        self._done.acquire()
        try:
            self._worker = _idle.pop()
        except IndexError:
            self._worker = _Worker()
        self._worker.jobs.put(self)

    def wait_begun(self) -> None:
        """Lets the thread begin now: it needs Python's lock for that, which this thread may not release for a while."""
        self._begun.acquire()

    def wait(self) -> list[int]:
        """Waits until all is done; gives the indices of the parts that were abandoned because they take too long."""
        limit_s = max(MIN_LIMIT_S, self._limit_s / (1 + len(_stuck)))
        deadline = time.monotonic() + PATIENCE * limit_s
        while not self._done.acquire(timeout=limit_s):
            with self._lock:
                if self._is_over:
                    continue
                has_used_limit = self._worker.processor_s() - self._part_started_s >= limit_s
                if not has_used_limit and time.monotonic() <= deadline:
                    continue
                self._is_abandoned = True
            return self._run_rest_after_stuck()
        return []

    def _run_rest_after_stuck(self) -> list[int]:
        """Another thread runs the parts after the one that is stuck."""
        stuck = self._part_idx
        self._worker.abandon()
        self.seconds = max(self.seconds, self._limit_s)
        remaining = self._parts[stuck + 1 :]
        if not remaining:
            return [stuck]
        rest = Job(remaining, self._limit_s)
        stuck_later = [stuck + 1 + idx for idx in rest.wait()]
        self.result = rest.result
        self.error = rest.error or self.error
        return [stuck, *stuck_later]

    def run(self) -> bool:
        """In the thread: False if the job was abandoned meanwhile."""
        self._begun.release()
        for idx, part in enumerate(self._parts):
            with self._lock:
                if self._is_abandoned:
                    return False
                self._part_idx = idx
                self._part_started_s = time.thread_time()
            started = time.perf_counter()
            try:
                self.result = part()
            except Exception as error:
                self.error = error
            self.seconds = max(self.seconds, time.perf_counter() - started)
        with self._lock:
            self._is_over = not self._is_abandoned
        return self._is_over

    def finish(self) -> None:
        self._done.release()


class _Worker:
    """A thread that runs one job after the other, until one is abandoned: the thread ends with it."""

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

    def abandon(self) -> None:
        _stuck.add(self)
        if not self._thread.is_alive():
            _stuck.discard(self)
        thread_id = self._thread.native_id
        if sys.platform == "linux" and thread_id is not None:  # elsewhere threads have no priority of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread_id, LOW_PRIORITY)

    def processor_s(self) -> float:
        """The processor time the thread has used; infinite where the system cannot tell."""
        thread_id = self._thread.ident
        if thread_id is not None:
            with contextlib.suppress(AttributeError, OSError):
                return time.clock_gettime(time.pthread_getcpuclockid(thread_id))
        return float("inf")


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
    """Ends the threads that have no work; a later call starts others."""
    with contextlib.suppress(IndexError):
        while True:
            _idle.pop().jobs.put(None)
