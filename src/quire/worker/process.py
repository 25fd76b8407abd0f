"""A worker as a process of its own: `python -m quire.worker.process`, started by `executor/multiproc.py`.

Imports what it needs, reads its `RankSetup` from standard input, then carries out the commands of its ring (`rank.py`),
and sleeps on it when there are none. Knows no requests.
"""

import importlib
import sys
from typing import TYPE_CHECKING

import msgspec

from quire.errors import QuireError
from quire.ranks import RankSetup, Reply
from quire.utils import child
from quire.utils.ring import RingReader, RingWriter
from quire.worker.rank import WORKER, Rank, pin

if TYPE_CHECKING:  # imported when signals are taken care of: this takes a second or two
    from quire.distributed.base import Link, Ranks


class RankProcess(Rank):
    setup: RankSetup

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        self.commands = RingReader(setup.commands)
        self.replies = RingWriter(setup.replies)

    def run(self) -> int:
        try:
            parallel = self.setup.config.parallel
            pin(self.setup.config, parallel.first_worker + self.setup.rank, parallel.num_workers * parallel.num_engines)
            self._send(self.load(self.ranks()))
            while True:
                for data in self.commands.wait():
                    reply = self.carry_out(self.decode(data))
                    if reply is not None:
                        self._send(reply)
        except Exception as error:
            self._send(self.failure(error))
            return error.exit_code if isinstance(error, QuireError) else 1

    def ranks(self) -> "Ranks":
        return ranks(self.setup)

    def _send(self, reply: Reply) -> None:
        self.replies.write(self.encode(reply))


def ranks(setup: RankSetup) -> "Ranks":
    """How this worker reaches the others."""
    from quire.distributed.base import Group, Ranks

    parallel = setup.config.parallel
    if parallel.num_workers == 1:
        return Ranks(device_idx=parallel.first_device)
    shared = setup.shared
    if shared.store is not None:
        from quire.distributed import nccl

        size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        return nccl.connect(shared.store, setup.rank, size, num_stages, parallel.first_device)
    from quire.distributed.shared_memory import SharedMemoryGroup, SharedMemoryLink

    def link(fd: int | None) -> "Link | None":
        return None if fd is None else SharedMemoryLink(fd)

    group = Group()
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
    parallel = setup.config.parallel
    child.log_as(f"worker {parallel.first_worker + setup.rank}")
    return process(setup).run()


if __name__ == "__main__":
    sys.exit(main())
