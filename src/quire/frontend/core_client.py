"""One core process and the socket to it; the supervisor makes a new one for each epoch and reuses nothing of the last.

The socket lies in a folder only this user may enter, under a name of its own. Knows processes and messages, not
requests.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from quire.config import EngineConfig
from quire.frontend.exchange import Client
from quire.messages import CoreSetup, FromCore, ToCore
from quire.utils.child import DUMP_SIGNAL, framed
from quire.utils.flight import FlightRecorder

CORE = "quire.core.process"
DUMP_GRACE_S = 0.3  # for a core that stands still to write what it is doing
GROUP_TICK_S = 0.01
WORKERS_GRACE_S = 5.0  # for the kernel to take a dead core's workers down, and their device's memory back

# A core never sends these to itself: it was killed from outside.
OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromCore).decode


async def start_process(config: EngineConfig) -> Process:
    """A core process that imports what it will need, then waits for its `CoreSetup`.

    It has a session of its own, so that the terminal's Ctrl-C reaches this process alone.
    """
    parallel = config.parallel
    arguments = parallel.executor, str(parallel.num_workers)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", CORE, *arguments, stdin=PIPE, start_new_session=True
    )


async def end_process(process: Process) -> None:
    """Kills it if it still runs, reaps it, and closes our end of its standard input."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
    await _group_ended(process.pid)


async def _group_ended(pid: int) -> None:
    """Waits for the processes that a dead core had started, which die with it: the next one needs their memory.

    A cluster that it had started for itself may have left some that would not.
    """
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    for _ in range(int(WORKERS_GRACE_S / GROUP_TICK_S)):
        with contextlib.suppress(ChildProcessError):  # the first process of a container inherits them
            os.waitpid(-pid, os.WNOHANG)
        try:
            os.killpg(pid, 0)
        except OSError:
            return
        await asyncio.sleep(GROUP_TICK_S)


class CoreClient(Client):
    def __init__(self, config: EngineConfig, folder: Path, epoch: int) -> None:
        self.config = config
        self.address = f"ipc://{folder}/core-{epoch}"
        self.record_path = folder / f"flight-{epoch}"
        self.recorder = FlightRecorder(self.record_path, create=True)
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.bind(self.address)
        self.process: Process | None = None
        self.ready = False
        self.killed = False  # by us, maybe before there was a process

    @property
    def pid(self) -> int:
        return self._require_process().pid

    def _require_process(self) -> Process:
        if self.process is None:
            raise RuntimeError("the core's process was not started")
        return self.process

    async def start(self, spare: Process | None = None, is_asleep: bool = False) -> None:
        """`spare`: a process that waits already, if there is one. `is_asleep`: it shall load nothing yet."""
        self.process = spare or await start_process(self.config)
        if self.killed:
            self.kill()
        setup = encode(CoreSetup(self.config, self.address, str(self.record_path), is_asleep))
        stdin = self.process.stdin
        # An error here means that the process is dead (uvloop raises RuntimeError then): `exited` will tell.
        with contextlib.suppress(ConnectionError, RuntimeError):
            if stdin is not None:
                stdin.write(framed(setup))
                await stdin.drain()

    def send(self, message: ToCore) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        self.socket.send(data, zmq.NOBLOCK)

    async def receive(self) -> FromCore:
        """The next message; msgspec.DecodeError if what came cannot be read as one."""
        return _decode(await self.socket.recv())

    def rest(self) -> Iterator[FromCore]:
        """What a dead core had still sent, as far as it can be read."""
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket)
        with contextlib.suppress(zmq.Again, msgspec.DecodeError):
            while True:
                yield _decode(socket.recv(zmq.NOBLOCK))

    async def exited(self) -> bool:
        """Waits for the end; True if the core crashed or exited by itself, False if a signal from outside killed it."""
        code = await self._require_process().wait()
        return -code not in OUTSIDE_SIGNALS

    def in_flight(self) -> list[str]:
        return self.recorder.read()

    async def dump_and_kill(self) -> None:
        """For a core that stands still: it and its workers log what their threads are doing, if they can."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, DUMP_SIGNAL)
            await asyncio.sleep(DUMP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        self.killed = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def close(self) -> None:
        """Ends the process and removes its socket and its flight record."""
        if self.process is not None:
            self.killed = True
            await end_process(self.process)
        self.socket.close(linger=0)
        self.context.term()
        self.recorder.close()
        for path in (self.record_path, Path(self.address.removeprefix("ipc://"))):
            path.unlink(missing_ok=True)
