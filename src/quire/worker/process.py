"""A worker as a process of its own: `python -m quire.worker.process`, started by `executor/multiproc.py`.

Imports what it needs, reads its `RankSetup` from standard input, loads its part of the model, then carries out commands
in the order in which they come, as an executor's own calls would be. Sleeps on its ring when there are none. Knows no
requests.
"""

import importlib
import logging
import os
import sys
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quire.config import resolved
from quire.errors import QuireError
from quire.ranks import (
    Allocate,
    Allocated,
    Blocks,
    Collect,
    Command,
    CountBlocks,
    Done,
    Facts,
    Failure,
    Forward,
    RankSetup,
    Reply,
    Sample,
    Sleep,
    Stepped,
    WakeUp,
)
from quire.step import Masks
from quire.utils import child
from quire.utils.ring import RingReader, RingWriter

if TYPE_CHECKING:  # imported when signals are taken care of: this takes a second or two
    from quire.distributed.base import Link, Ranks
    from quire.worker.runner import Pending

log = logging.getLogger(__name__)

WORKER = "quire.worker.worker"


class RankProcess:
    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.commands = RingReader(setup.commands)
        self.replies = RingWriter(setup.replies)
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(Command).decode
        # On a CPU the launch of a step computes it. Elsewhere the executor says when it waits for one, so that the
        # next can be launched before.
        self.is_done_at_once = setup.config.device.device == "cpu"
        self.launched: deque[Pending] = deque()

    def run(self) -> int:
        try:
            pin(self.setup)
            self.worker = importlib.import_module(WORKER).Worker(self.setup.config, self.ranks())
            self._send(self._facts())
            while True:
                for data in self.commands.wait():
                    reply = self.carry_out(self.decode(data))
                    if reply is not None:
                        self._send(reply)
        except Exception as error:
            return self._fail(error)

    def ranks(self) -> "Ranks":
        return ranks(self.setup)

    def carry_out(self, command: Command) -> Reply | None:
        worker = self.worker
        match command:
            case Forward():
                worker.runner.forward(command.plan)
                return self._sample(None) if command.is_sampled else None
            case Sample():
                return self._sample(command.masks)
            case Collect():
                return self._collect()
            case CountBlocks():
                return Blocks(worker.num_blocks(command.layout))
            case Allocate():
                worker.allocate(command.layout)
                child.freeze_memory()
                return Allocated(worker.num_graphs)
            case Sleep():
                worker.sleep(command.keep_weights)
                return Done()
            case WakeUp():
                worker.wake_up()
                return Done()
        return None

    def _sample(self, masks: Masks | None) -> Stepped | None:
        self.launched.append(self.worker.runner.sample(masks))
        return self._collect() if self.is_done_at_once else None

    def _collect(self) -> Stepped | None:
        """Every rank waits for its part, so that none runs ahead; one tells."""
        result = self.launched.popleft().result()
        return Stepped(result) if self.setup.answers_steps else None

    def _facts(self) -> Facts:
        worker = self.worker
        drafter = worker.drafter
        return Facts(worker.kv_specs(), worker.weight_bytes, drafter.num_drafts, drafter.num_ahead, drafter.cost)

    def _fail(self, error: Exception) -> int:
        if isinstance(error, QuireError):
            self._send(Failure(type(error).__name__, str(error)))
            return error.exit_code
        log.error("this worker failed", exc_info=error)
        first_line = str(error).strip().partition("\n")[0][:200]
        said = f"worker {self.setup.rank} failed ({type(error).__name__}: {first_line}): the log has more"
        self._send(Failure("EngineError", said))
        return 1

    def _send(self, reply: Reply) -> None:
        self.replies.write(self.encode(reply))


def pin(setup: RankSetup) -> None:
    """Ranks that wait for each other in every layer must not share a core: each gets its own, if there are enough."""
    if setup.config.device.device != "cpu" or setup.config.parallel.num_workers == 1:
        return
    cores, num_threads = sorted(os.sched_getaffinity(0)), resolved(setup.config.device.num_threads)
    if setup.config.parallel.num_workers * num_threads <= len(cores):
        os.sched_setaffinity(0, cores[setup.rank * num_threads : (setup.rank + 1) * num_threads])


def ranks(setup: RankSetup) -> "Ranks":
    """How this worker reaches the others."""
    from quire.distributed.base import ALONE, Ranks

    parallel = setup.config.parallel
    if parallel.num_workers == 1:
        return ALONE
    shared = setup.shared
    if shared.store is not None:
        from quire.distributed import nccl

        return nccl.connect(shared.store, setup.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    from quire.distributed.shared_memory import SharedMemoryGroup, SharedMemoryLink

    def link(fd: int | None) -> "Link | None":
        return None if fd is None else SharedMemoryLink(fd)

    group = ALONE.group
    if shared.group is not None:
        group = SharedMemoryGroup(shared.group, setup.place, parallel.tensor_parallel_size)
    return Ranks(group, setup.stage, parallel.pipeline_parallel_size, link(shared.before), link(shared.after))


def main(process: type[RankProcess] = RankProcess) -> int:
    child.prepare()
    importlib.import_module(WORKER)
    data, fds = child.read_setup()
    if not data:
        return 0  # it stood by, and was never needed
    child.end_with_input()
    setup = msgspec.msgpack.decode(data, type=RankSetup).received(fds)
    sys.path[:] = setup.path
    child.log_as(f"worker {setup.rank}")
    return process(setup).run()


if __name__ == "__main__":
    sys.exit(main())
