"""Machines of a Ray cluster as network namespaces of this one: each has an address of its own, and can be lost.

Needs root and iproute2. Everything of a machine ends with `lose`, of all with `close`.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379


def why_not() -> str:
    """Why there can be no such machines here; empty: there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"qtry{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name])
    return ""


def environment(token: str | None) -> dict[str, str]:
    """Of a process that has this token; None: that knows of none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    tokens = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return {**kept, **tokens, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


class Machine:
    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.through = ["ip", "netns", "exec", name]  # the start of a command that runs there

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def unplug(self) -> None:
        """Its processes live, and nobody hears of them any more."""
        _ip(f"-n {self.name} link set eth0 down")

    def lose(self) -> None:
        """All its processes die at once."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


class Machines:
    """`with Machines() as machines: machines.add()` starts a cluster of one; those that follow join it."""

    def __init__(self) -> None:
        number = os.getpid() % 10_000
        self.bridge = f"qb{number}"
        self.network = f"10.{100 + number // 100}.{number % 100}"
        self.token = secrets.token_hex(16)
        self.all: list[Machine] = []
        self.folder = tempfile.mkdtemp(prefix="qr-", dir="/tmp")
        _ip(f"link add {self.bridge} type bridge")
        _ip(f"address add {self.network}.254/24 dev {self.bridge}")
        _ip(f"link set {self.bridge} up")

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.all[0].address}:{PORT}"

    def environment(self) -> dict[str, str]:
        """Ray's processes give a lost head up after seconds, not after a minute."""
        return {**environment(self.token), "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}

    def add(self, num_cpus: int = 1, without: Path | None = None) -> Machine:
        """`without`: a folder that it does not have."""
        number = len(self.all) + 1
        machine = Machine(f"{self.bridge}n{number}", f"{self.network}.{number}")
        ours, theirs = f"{self.bridge}v{number}", "eth0"
        _ip(f"netns add {machine.name}")
        _ip(f"link add {ours} type veth peer name {theirs} netns {machine.name}")
        _ip(f"link set {ours} master {self.bridge} up")
        _ip(f"-n {machine.name} address add {machine.address}/24 dev {theirs}")
        _ip(f"-n {machine.name} link set {theirs} up")
        _ip(f"-n {machine.name} link set lo up")
        self.all.append(machine)
        self._start_ray(machine, num_cpus, without)
        return machine

    def _start_ray(self, machine: Machine, num_cpus: int, without: Path | None) -> None:
        of_head = f"--head --port={PORT} --include-dashboard=false --disable-usage-stats --temp-dir={self.folder}"
        which = of_head if len(self.all) == 1 else f"--address={self.address}"
        sizes = f"--num-cpus={num_cpus} --object-store-memory=100000000"
        command = f"{RAY} start {which} --node-ip-address={machine.address} {sizes}"
        if without is not None:
            command = f"mount -t tmpfs none {without} && exec {command}"
        program: Sequence[str] = ["unshare", "--mount", "sh", "-c", command]
        done = subprocess.run(
            [*machine.through, *program], env=self.environment(), capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"ray start failed: {done.stdout}{done.stderr}")

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *exception: object) -> None:
        for machine in self.all:
            machine.lose()
            _ip(f"netns del {machine.name}")
        _ip(f"link del {self.bridge}")
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
