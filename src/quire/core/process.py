"""The core as a process of its own: `python -m quire.core.process`, started and replaced by the frontend.

Imports what its executor needs, reads its set-up from standard input, then reads messages from a socket, and answers
there with the outputs of each step. Sending never blocks. The process lives as long as its standard input stays open,
so no core outlives its frontend. Knows nothing of clients.
"""

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from quire.core.engine import Engine, executor_module
from quire.errors import QuireError, WorkerDied
from quire.messages import (
    AddRequest,
    Answer,
    CoreSetup,
    EngineStats,
    Failed,
    FromCore,
    LiveUpdate,
    Ready,
    StepOutputs,
    ToCore,
)
from quire.utils import child
from quire.utils.flight import FlightRecorder

log = logging.getLogger(__name__)

HEARTBEAT_MS = 1000  # how often an idle core says that it is alive


class CoreProcess:
    def __init__(self, setup: CoreSetup) -> None:
        self.setup = setup
        self.socket = zmq.Context().socket(zmq.PAIR)
        self.socket.set_hwm(0)  # no limit, so sending never waits; the frontend limits the number of requests
        self.socket.connect(setup.address)
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(ToCore).decode

    def run(self) -> int:
        if self.setup.is_asleep:
            self._sleep()
        try:
            self.engine = Engine(self.setup.config, recorder=FlightRecorder(Path(self.setup.recorder)))
        except QuireError as error:
            self._send(Failed(type(error).__name__, str(error)))
            self.socket.close(linger=1000)
            return error.exit_code
        child.freeze_memory()
        self._send(self.engine.ready())
        if self.setup.is_asleep:
            self._send(Answer())  # to the question that woke it up
        try:
            self._serve()
        except WorkerDied as error:
            log.error("%s", error)
            if error.signal is not None:
                child.end_by(error.signal)  # the frontend judges by that
            return error.exit_code

    def _serve(self) -> NoReturn:
        while True:
            self._read(0 if self.engine.has_work else self._idle_ms())
            if not self.engine.has_work:
                self.engine.executor.check()
            started = time.perf_counter()
            outputs = self.engine.step()
            if outputs.stats.step_tokens:
                outputs.step_s = time.perf_counter() - started
            if (prefixes := self.engine.prefixes()) is not None:
                self._send(prefixes)  # first: whoever asks again after the answer finds what was cached by it
            self._send(outputs)
            if self.engine.live is not None and (update := self.engine.live_update()) is not None:
                self._send(LiveUpdate(update))

    def _idle_ms(self) -> int:
        live = self.engine.live
        return HEARTBEAT_MS if live is None else live.wait_ms(HEARTBEAT_MS)

    def _sleep(self) -> None:
        """Until the message that wakes it up comes, before which there are no others."""
        self._send(Ready(0))
        while not self.socket.poll(HEARTBEAT_MS):
            self._send(StepOutputs([], EngineStats()))
        self.socket.recv()

    def _read(self, timeout_ms: int) -> None:
        """Handles all messages that have arrived, after waiting up to `timeout_ms` for the first."""
        if timeout_ms and not self.socket.poll(timeout_ms):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                data = self.socket.recv(zmq.NOBLOCK)
                try:
                    message = self.decode(data)
                except Exception:
                    log.exception("a message cannot be decoded")
                    self._refuse_undecoded(data)
                    continue
                if (answer := self.engine.handle(message)) is not None:
                    self._send(answer)

    def _refuse_undecoded(self, data: bytes) -> None:
        """Refuses the request of a message that cannot be decoded: its id is readable without the types of the rest."""
        with contextlib.suppress(Exception):
            match msgspec.msgpack.decode(data):
                case [kind, str(request_id), *_] if kind == AddRequest.__struct_config__.tag:
                    self.engine.num_received += 1
                    self.engine.refuse(request_id)

    def _send(self, message: FromCore) -> None:
        self.socket.send(self.encode(message), zmq.NOBLOCK)


def main() -> int:
    child.prepare()
    child.log_as("core")
    with contextlib.suppress(QuireError):  # an unknown executor is reported later, by `CoreProcess.run`
        prepare = getattr(executor_module(sys.argv[1]), "prepare", None)
        if prepare is not None:
            prepare(int(sys.argv[2]))
    data, _ = child.read_setup()
    if not data:
        return 0  # a standby process that was never needed
    setup = msgspec.msgpack.decode(data, type=CoreSetup)
    if setup.config.parallel.num_engines > 1:
        child.log_as(f"core {setup.config.parallel.data_parallel_index}")
    child.end_with_input()
    return CoreProcess(setup).run()


if __name__ == "__main__":
    sys.exit(main())
