"""Workers in processes of their own, one per device: `--distributed-executor-backend mp`, or where there are several.

Commands go to all workers through one ring in shared memory, encoded once; each answers through its own. Wherever
replies are waited for, so is the death of a worker. Knows rings and processes, not what is said to them.
"""

import os
import select
import sys

from quire.executor import _processes
from quire.executor._processes import WorkerProcess
from quire.executor._remote import RemoteExecutor
from quire.ranks import RankSetup, SharedFds
from quire.utils.ring import RingFds, RingReader, RingWriter
from quire.utils.shared_memory import group_memory, link_memory, store_file

PROCESS = "quire.worker.process"


def prepare(num_workers: int) -> None:
    _processes.start_spares(PROCESS, num_workers)


class MultiprocExecutor(RemoteExecutor):
    process_module = PROCESS

    def _start(self) -> None:
        """Makes what ranks share, tells each its part, and maps our ends."""
        self.fds: list[int] = []  # that are ours to close
        self.rings: list[RingReader | RingWriter] = []
        self.processes: list[WorkerProcess] = []
        num_workers = self.config.parallel.num_workers
        self.processes = _processes.take(self.process_module, num_workers)
        commands = self._opened(RingFds.open(num_workers))
        replies = [self._opened(RingFds.open(1)) for _ in range(num_workers)]
        shared = self._shared()
        for rank, process in enumerate(self.processes):
            setup = RankSetup(
                config=self.config,
                rank=rank,
                commands=commands.end(rank),
                replies=replies[rank],
                shared=shared[rank],
                path=sys.path,
            )
            process.set_up(self.encode(setup), setup.fds())
        self.commands = RingWriter(commands)
        self.readers = [RingReader(fds) for fds in replies]
        self.rings += [self.commands, *self.readers]
        self.ranks_by_reply_fd = {fds.written[0]: rank for rank, fds in enumerate(replies)}
        self.ranks_by_pidfd = {process.pidfd: rank for rank, process in enumerate(self.processes)}
        watched = [*self.ranks_by_reply_fd, *self.ranks_by_pidfd]
        self.poll_replies = _poll(watched)
        self.poll_all = _poll([*watched, *commands.released])  # while the ring of commands is full

    def _shared(self) -> list[SharedFds]:
        """Of each rank."""
        parallel = self.config.parallel
        if parallel.num_workers == 1:
            return [SharedFds()]
        if self.config.device.device != "cpu":
            return [SharedFds(store=self._owned(store_file()))] * parallel.num_workers
        size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        groups = [self._owned(group_memory(size)) if size > 1 else None for _ in range(num_stages)]
        links: list[list[int | None]] = [
            [self._owned(link_memory()) for _ in range(size)] for _ in range(num_stages - 1)
        ]
        no_links: list[int | None] = [None] * size
        ends: list[list[int | None]] = [no_links, *links, no_links]  # before each stage, and after the last
        return [
            SharedFds(groups[stage], ends[stage][place], ends[stage + 1][place])
            for stage in range(num_stages)
            for place in range(size)
        ]

    def _owned(self, fd: int) -> int:
        self.fds.append(fd)
        return fd

    def _opened(self, ring: RingFds) -> RingFds:
        self.fds += ring.all()
        return ring

    def check(self) -> None:
        self._poll_in(self.poll_replies, timeout_ms=0)

    def close(self) -> None:
        _processes.end(self.processes)
        self.processes = []
        for ring in self.rings:
            ring.close()
        self.rings = []
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    # -- speaking to workers ---------------------------------------------------------------------------------------

    def _post(self, command: bytes) -> None:
        self.commands.write(command, lambda: self._poll_in(self.poll_all))

    def _take_in(self) -> None:
        self._poll_in(self.poll_replies)

    def _poll_in(self, poll: select.poll, timeout_ms: int | None = None) -> None:
        """Sleeps until something happens, and takes in what workers say. Raises if one has failed, or died."""
        ready = [fd for fd, _ in poll.poll(timeout_ms)]
        dead = [self.ranks_by_pidfd[fd] for fd in ready if fd in self.ranks_by_pidfd]
        if dead:
            ready = [fd for fd, _ in poll.poll(0)]  # what it said last, which may be why
        for fd in ready:
            if fd in self.ranks_by_reply_fd:
                rank = self.ranks_by_reply_fd[fd]
                for data in self.readers[rank].wait():
                    self._taken(rank, data)
        if dead:
            self._break(self.processes[dead[0]].death(dead[0]))


def _poll(fds: list[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


EXECUTOR = MultiprocExecutor
