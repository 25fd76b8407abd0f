"""A server as a process, watched from outside through /proc: its CPU time, memory, file descriptors and children.

Used by the serving benchmarks. Linux only.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

QUIRE = [sys.executable, "-m", "quire", "serve"]
START_S = 120.0
END_S = 5.0  # for the processes of a server that has ended


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ServerProcess:
    """Runs a command with `--port P` and waits until its server answers.

    `with ServerProcess([*QUIRE, "smollm2"], "/ready") as server: …`"""

    def __init__(
        self, command: list[str], probe: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.probe = self.url + probe
        # The server's TMPDIR: a server that has ended should have left nothing there.
        self.folder = tempfile.TemporaryDirectory(prefix="q-")
        self.log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")
        variables = {**os.environ, **(environment or {}), "TMPDIR": self.folder.name, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            env=variables,
        )
        self.process.stdin.write(stdin)
        self.process.stdin.close()
        # When it was asked to end: its processes, and what these had opened below /dev/shm.
        self.pids: set[int] = set()
        self.shared: set[Path] = set()

    def __enter__(self) -> "ServerProcess":
        deadline_s = time.monotonic() + START_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                said = self.log_tail()
                self.__exit__()
                raise SystemExit(f"the server did not start:\n{said}")
            time.sleep(0.1)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def answers(self) -> bool:
        try:
            return urllib.request.urlopen(self.probe, timeout=5).status == 200
        except (OSError, urllib.error.HTTPError):
            return False

    def stop(self, timeout_s: float = 60.0) -> int | None:
        """Asks it to end; its exit status, None if it does not end in time."""
        return self.end_by(signal.SIGTERM, timeout_s)

    def end_by(self, signum: signal.Signals, timeout_s: float = 60.0) -> int | None:
        self.pids = family(self.pid)
        self.shared = {path for pid in self.pids for path in shared_files(pid)}
        self.process.send_signal(signum)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> str:
        return Path(self.log.name).read_text(errors="replace")[-4000:]

    def leftovers(self) -> list[str]:
        """What an ended server should have taken with it; one that was killed cannot remove its folder."""
        kept = [] if self.process.returncode == -signal.SIGKILL else Path(self.folder.name).rglob("*")
        found = [f"the file {path.name} is still there" for path in (*kept, *filter(Path.exists, self.shared))]
        deadline_s = time.monotonic() + END_S
        while (living := [pid for pid in self.pids if state(pid) not in "ZX"]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        found += [f"the process {pid} is still there" for pid in living]
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", self.port)) == 0:
                found.append(f"port {self.port} is still open")
        return found

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def core_pid(self) -> int:
        """The engine at work: the child that has a flight recorder, where another stands by; else the only child."""
        living = [pid for pid in children(self.pid) if state(pid) not in "ZX"]
        (pid,) = self.core_pids or living
        return pid

    @property
    def core_pids(self) -> list[int]:
        """The engines at work, where there may be several."""
        return [pid for pid in children(self.pid) if state(pid) not in "ZX" and "/flight-" in maps(pid)]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found += map(int, task.read_text().split())
    return found


def family(pid: int) -> set[int]:
    """A process, its children, and theirs."""
    return {pid}.union(*map(family, children(pid)))


def shared_files(pid: int) -> set[Path]:
    """Below /dev/shm, that it has mapped or open."""
    found = set(re.findall(r"/dev/shm/\S+", maps(pid)))
    with contextlib.suppress(OSError):  # it is gone
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {Path(path) for path in found if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}


def listening_inodes(pid: int) -> set[str]:
    """Of TCP sockets in state LISTEN that the process holds."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    held = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return listening & held


def maps(pid: int) -> str:
    """The files it has mapped; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def state(pid: int) -> str:
    """As ps shows it: R, S, D, T, Z; X when there is no such process."""
    try:
        return _stat(pid)[0]
    except OSError:
        return "X"


def cpu_s(pid: int) -> float:
    """CPU time used so far, by all threads, in steps of 10 ms."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Resident memory of its own, without the pages of mapped files, which depend on what else the machine does."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def num_files(pid: int) -> int:
    """File descriptors that are open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process's name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
