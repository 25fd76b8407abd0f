"""`quire serve` as its users run it: a process of its own, reached over HTTP."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from benchmarks.server_process import children, free_port, maps, state

ROOT = Path(__file__).parents[1]


class ServerProcess:
    """`with ServerProcess("--executor", "echo") as server: server.post("/v1/completions", {...})`

    Leaving the block kills what still runs. `host`: where it listens; `through`: the command that starts it there.
    """

    def __init__(
        self,
        *flags: str,
        wait: bool = True,
        environment: dict[str, str] = {},
        host: str = "127.0.0.1",
        through: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        self._log = tempfile.TemporaryFile("w+")
        address = "--host", host, "--port", str(self.port)
        command = [*through, sys.executable, "-m", "quire", "serve", *address, *flags]
        self._folder = tempfile.TemporaryDirectory(prefix="q-")
        self.folder = Path(self._folder.name)  # its TMPDIR
        # Tests under -O are about servers under -O.
        env = {**os.environ, "PYTHONOPTIMIZE": str(sys.flags.optimize or ""), "TMPDIR": str(self.folder), **environment}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT, env=env)
        self.client = httpx.Client(base_url=self.url, timeout=120)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> str:
        """The line that says so."""
        lines = []
        while "serving" not in (line := self.process.stdout.readline()):
            lines.append(line)  # of Ray, which tells of machines that were lost before
            if not line:
                raise RuntimeError(f"the server did not start: {''.join(lines)}{self.log()}")
        return line

    def log(self) -> str:
        """What it wrote to standard error."""
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def children(self) -> list[int]:
        return children(self.process.pid)

    def core_pid(self, timeout_s: float = 20) -> int:
        """Of the engine at work: the child that holds a flight recorder; another child may stand by.

        After an engine's death it takes a moment until there is another.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := [pid for pid in self.children() if "/flight-" in maps(pid)]):
            if time.monotonic() > deadline:
                raise AssertionError("there is no engine")
            time.sleep(0.02)
        return found[0]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, timeout_s: float = 30) -> int:
        self.signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._log.close()
        self._folder.cleanup()


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    return state(pid) not in "ZX"


def until(condition, timeout_s: float = 60.0, what: str = "the condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {timeout_s} s")
        time.sleep(0.02)
