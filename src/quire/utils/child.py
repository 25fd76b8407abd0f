"""What processes of ours have in common that others start: cores, workers, the process that tries grammars.

They are told what to do over standard input, may wait for that with everything imported, and end with their parent.
Knows processes, not what they do.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Sequence

from quire import env
from quire.utils.json_lines import JsonFormatter

DUMP_SIGNAL = signal.SIGUSR1  # dumps the stack of each thread; sent before a process that hangs is killed
GC_THRESHOLD = 50_000  # a step makes thousands of objects and no cycles
START_LOG = "quire.start"  # the logger of what is said at each start, also where only warnings are shown
MAX_FDS = 64  # that come with a set-up

_PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """The first thing a process does: how it takes signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides what it means
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)


def log_as(name: str) -> None:
    """Lines of the log say who wrote them."""
    human = logging.Formatter(f"%(asctime)s %(levelname).1s {name} %(name)s: %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(name) if env.logs_json() else human)
    logging.basicConfig(level=env.log_level(), handlers=[handler], force=True)
    logging.getLogger(START_LOG).setLevel(env.log_level("info"))


def freeze_memory() -> None:
    """What is loaded now stays for good: the garbage collector need not look at it again."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


# -- being told what to do ---------------------------------------------------------------------------------------------


def framed(setup: bytes) -> bytes:
    """What the parent writes."""
    return len(setup).to_bytes(4, "little") + setup


def send_setup(channel: socket.socket, setup: bytes, fds: Sequence[int]) -> None:
    """Writes to a child whose standard input is a socket; it gets its own copies of the descriptors."""
    data = framed(setup)
    num_sent = socket.send_fds(channel, [data], fds)
    channel.sendall(data[num_sent:])


def read_setup() -> tuple[bytes, list[int]]:
    """What the parent wrote, and descriptors that came with it. Empty: it ended, and we were never needed."""
    fds: list[int] = []
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        with socket.socket(fileno=os.dup(0)) as channel:
            head, fds, _, _ = socket.recv_fds(channel, 4, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    else:
        head = os.read(0, 4)
    size = int.from_bytes(head, "little")
    data = b""
    while len(data) < size and (part := os.read(0, size - len(data))):
        data += part
    return data if len(data) == size else b"", fds


# -- ending ------------------------------------------------------------------------------------------------------------


def end_with_parent(parent_pid: int | None = None) -> None:
    """Has the kernel kill this process when the thread that started it ends, also if it is busy or stopped then.

    `parent_pid`: for processes that do not watch their input. The parent may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent_pid is not None and os.getppid() != parent_pid:
            os._exit(1)


def end_with_input() -> None:
    """The same where the kernel does not do it, or the parent had ended before: then standard input ends."""
    end_with_parent()

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def end_by(signum: int) -> None:
    """Ends this process as if it had got the signal, so that whoever waits for it sees why."""
    faulthandler.disable()
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
