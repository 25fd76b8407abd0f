"""Worker processes as their parent sees them: starting, setting up, watching for their end, killing.

Used by `multiproc.py`. Knows processes, not what is said to them.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.errors import WorkerDied
from quire.utils.child import send_setup

# Workers die with the thread that started them (`utils/child.py`): this one lives as long as the process, while a
# user's thread that made an `LLM` may end before it.
_parent = ThreadPoolExecutor(1, thread_name_prefix="parent of workers")
_spares: "list[WorkerProcess]" = []  # that wait for the executor of this process


def _begin_anew() -> None:
    """In a process that was forked off: its parent's threads and children are not its own."""
    global _parent
    _parent = ThreadPoolExecutor(1, thread_name_prefix="parent of workers")
    _spares.clear()


os.register_at_fork(after_in_child=_begin_anew)


class WorkerProcess:
    """Runs `python -m module`, which waits for its set-up with everything imported."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", module]
        try:
            self._process = _parent.submit(lambda: subprocess.Popen(command, stdin=theirs.fileno())).result()
        except BaseException:
            self._channel.close()  # if there is a process after all, this ends it
            raise
        finally:
            theirs.close()
        self.pidfd = os.pidfd_open(self._process.pid)  # can be read when it has ended

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def set_up(self, setup: bytes, fds: Sequence[int]) -> None:
        with contextlib.suppress(ConnectionError):  # it is dead: `pidfd` tells
            send_setup(self._channel, setup, fds)

    def death(self, rank: int) -> WorkerDied:
        """Why it ended, which it has."""
        code = self._process.wait()
        if code >= 0:
            return WorkerDied(f"worker {rank} ended with exit code {code}: the log has more")
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = ": the system may have run out of memory" if -code == signal.SIGKILL else ": the log may have more"
        return WorkerDied(f"worker {rank} was killed by {name}{why}", -code)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """After `kill`."""
        self._process.wait()
        self._channel.close()
        os.close(self.pidfd)


def end(processes: Iterable[WorkerProcess]) -> None:
    processes = list(processes)
    for process in processes:
        process.kill()
    for process in processes:
        process.close()


def start_spares(module: str, count: int) -> None:
    _spares.extend(WorkerProcess(module) for _ in range(count))


def take(module: str, count: int) -> list[WorkerProcess]:
    """As many processes, those that wait already first."""
    taken = [spare for spare in _spares if spare.module == module and spare.is_alive][:count]
    unfit = [spare for spare in _spares if spare not in taken]
    _spares.clear()
    end(unfit)
    try:
        while len(taken) < count:
            taken.append(WorkerProcess(module))
    except BaseException:
        end(taken)
        raise
    return taken
