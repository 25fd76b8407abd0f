"""One core process and the socket to it. The supervisor makes a new one for each epoch; nothing of an old one is used again.

The socket lies in a folder only this user may enter, under a name of its own. Knows processes and messages, not requests.
"""

import asyncio
import contextlib
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
from quire.utils.flight import FlightRecorder

CORE = "quire.core.process"
DUMP_GRACE_S = 0.3  # for a core that stands still to write what it is doing

# What a core does not do to itself.
OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromCore).decode


async def start_process(config: EngineConfig) -> Process:
    """A core process that has imported what it will need and waits to be told what to do: its set-up decides what it becomes.

    In a session of its own: the terminal's Ctrl-C is for us alone.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", CORE, config.device.executor, stdin=PIPE, start_new_session=True
    )


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
        return self.process.pid

    async def start(self, spare: Process | None = None) -> None:
        """`spare`: a process that waits already, if there is one."""
        self.process = spare or await start_process(self.config)
        if self.killed:
            self.kill()
        setup = encode(CoreSetup(self.config, self.address, str(self.record_path)))
        with contextlib.suppress(
            ConnectionError, RuntimeError
        ):  # it is dead already (RuntimeError: uvloop's word for it): `exited` tells
            self.process.stdin.write(len(setup).to_bytes(4, "little") + setup)
            await self.process.stdin.drain()

    def send(self, message: ToCore) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        self.socket.send(data, zmq.NOBLOCK)

    async def receive(self) -> FromCore:
        """The next message; msgspec.DecodeError where there is none in what came: what a core says is then unknown."""
        return _decode(await self.socket.recv())

    def rest(self) -> Iterator[FromCore]:
        """What a dead core had still sent, as far as it can be read."""
        socket = zmq.Socket.shadow(self.socket)
        with contextlib.suppress(zmq.Again, msgspec.DecodeError):
            while True:
                yield _decode(socket.recv(zmq.NOBLOCK))

    async def exited(self) -> bool:
        """Waits for the end; True if the core fell by itself."""
        code = await self.process.wait()
        return not (code < 0 and -code in OUTSIDE_SIGNALS)

    def in_flight(self) -> list[str]:
        return self.recorder.read()

    async def dump_and_kill(self) -> None:
        """For a core that stands still: it writes what its threads are doing to the log, if it can."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(DUMP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        self.killed = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def close(self) -> None:
        """Kills the process if it still runs, reaps it, and leaves nothing behind."""
        if self.process is not None:
            self.kill()
            await self.process.wait()
            self.process.stdin.close()
        self.socket.close(linger=0)
        self.context.term()
        self.recorder.close()
        for path in (self.record_path, Path(self.address.removeprefix("ipc://"))):
            path.unlink(missing_ok=True)
