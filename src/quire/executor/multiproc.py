"""Workers in processes of their own, one per device: `--distributed-executor-backend mp`, or where there are several.

Commands go to all workers through one ring in shared memory, encoded once; each answers through its own. Wherever
replies are waited for, so is the death of a worker. Knows ranks and what they are told (`ranks.py`), not what they
compute.
"""

import logging
import os
import select
import sys
from collections import deque
from typing import NoReturn, TypeVar

import msgspec

from quire.config import EngineConfig
from quire.errors import EngineError, QuireError
from quire.executor import _processes
from quire.executor.base import Executor
from quire.kv.specs import CacheSpec, KVLayout
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
    SharedFds,
    Sleep,
    Stepped,
    WakeUp,
    answering_rank,
)
from quire.step import Masks, StepPlan, StepResult
from quire.utils.ring import RingFds, RingReader, RingWriter
from quire.utils.shared_memory import group_memory, link_memory, store_file

log = logging.getLogger(__name__)

PROCESS = "quire.worker.process"

Kind = TypeVar("Kind", Facts, Blocks, Allocated, Done)


def prepare(num_workers: int) -> None:
    _processes.start_spares(PROCESS, num_workers)


class MultiprocExecutor(Executor):
    process_module = PROCESS

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.is_done_at_once = config.device.device == "cpu"  # see `worker/process.py`
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(Reply).decode
        self._num_graphs = 0
        self.problem = ""  # why the workers cannot be used any more
        num_workers = config.parallel.num_workers
        self.replies: list[deque[Reply]] = [deque() for _ in range(num_workers)]  # to commands, by rank
        self.results: deque[StepResult] = deque()  # of steps
        self.fds: list[int] = []  # that are ours to close
        self.rings: list[RingReader | RingWriter] = []
        self.processes = _processes.take(self.process_module, num_workers)
        try:
            self._connect()
            self.facts = self._replies(Facts)
        except BaseException:
            self.close()
            raise
        for rank, facts in enumerate(self.facts):
            log.info("%s holds %.0f MB of weights", self._name(rank), facts.weight_bytes / 1e6)

    # -- what the core asks ----------------------------------------------------------------------------------------

    @property
    def num_drafts(self) -> int:
        return self._sampling.num_drafts

    @property
    def num_ahead(self) -> int:
        return self._sampling.num_ahead

    @property
    def draft_cost(self) -> float:
        return self._sampling.draft_cost

    @property
    def _sampling(self) -> Facts:
        return self.facts[answering_rank(self.config)]

    def kv_specs(self) -> dict[str, CacheSpec]:
        """Of all stages, each told by the first of its ranks."""
        specs: dict[str, CacheSpec] = {}
        for facts in self.facts[:: self.config.parallel.tensor_parallel_size]:
            specs |= facts.kv_specs
        return specs

    def num_blocks(self, layout: KVLayout) -> list[int]:
        self._send(CountBlocks(layout))
        counts = [reply.num_blocks for reply in self._replies(Blocks)]
        for rank, count in enumerate(counts):
            log.info("%s has memory for %s blocks", self._name(rank), " and ".join(map(str, count)))
        return [min(of_pool) for of_pool in zip(*counts)]

    @property
    def num_graphs(self) -> int:
        return self._num_graphs

    def allocate(self, layout: KVLayout) -> None:
        self._send(Allocate(layout))
        self._num_graphs = max(reply.num_graphs for reply in self._replies(Allocated))

    def forward(self, plan: StepPlan) -> None:
        self._send(Forward(plan))

    def sample(self, plan: StepPlan, masks: Masks | None = None) -> "_Pending":
        self._send(Sample(masks))
        return _Pending(self, plan.step_id)

    def launch(self, plan: StepPlan) -> "_Pending":
        """One message: what is done after it that wakes the workers takes a core from them."""
        self._send(Forward(plan, is_sampled=True))
        return _Pending(self, plan.step_id)

    def sleep(self, keep_weights: bool) -> None:
        self._ask(Sleep(keep_weights))

    def wake_up(self) -> None:
        self._ask(WakeUp())

    def check(self) -> None:
        self._take_in(self.poll_replies, timeout_ms=0)

    def close(self) -> None:
        _processes.end(self.processes)
        self.processes = []
        for ring in self.rings:
            ring.close()
        self.rings = []
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    # -- rings -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Makes what ranks share, tells each its part, and maps our ends."""
        num_workers = len(self.processes)
        commands = self._opened(RingFds.open(num_workers))
        replies = [self._opened(RingFds.open(1)) for _ in range(num_workers)]
        shared = self._shared()
        for rank, process in enumerate(self.processes):
            setup = RankSetup(self.config, rank, commands.end(rank), replies[rank], shared[rank], sys.path)
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

    # -- speaking to workers ---------------------------------------------------------------------------------------

    def _ask(self, command: Command) -> None:
        """Returns when all ranks have carried it out."""
        self._send(command)
        self._replies(Done)

    def _send(self, command: Command) -> None:
        if self.problem:
            raise EngineError(self.problem)
        # Of a message that is sent in part, because Ctrl-C came or a worker died, nothing good can follow.
        self.problem = "the engine was interrupted while it told its workers what to do: start it again"
        self.commands.write(self.encode(command), lambda: self._take_in(self.poll_all))
        self.problem = ""

    def _replies(self, kind: type[Kind]) -> list[Kind]:
        """The next reply of each rank."""
        while not all(self.replies):
            self._wait()
        found = [reply for replies in self.replies if isinstance(reply := replies.popleft(), kind)]
        if len(found) < len(self.replies):
            self._break(EngineError("a worker answered what was not asked: this is a bug in the executor"))
        return found

    def next_result(self, step_id: int) -> StepResult:
        if not self.is_done_at_once:
            self._send(Collect())
        while not self.results:
            self._wait()
        result = self.results.popleft()
        if result.step_id != step_id:
            self._break(EngineError("a worker answered for another step: this is a bug in the executor"))
        return result

    def _wait(self) -> None:
        if self.problem:
            raise EngineError(self.problem)
        self._take_in(self.poll_replies)

    def _take_in(self, poll: select.poll, timeout_ms: int | None = None) -> None:
        """Sleeps until something happens, and takes in what workers say. Raises if one has failed, or died."""
        ready = [fd for fd, _ in poll.poll(timeout_ms)]
        dead = [self.ranks_by_pidfd[fd] for fd in ready if fd in self.ranks_by_pidfd]
        if dead:
            ready = [fd for fd, _ in poll.poll(0)]  # what it said last, which may be why
        for fd in ready:
            if fd in self.ranks_by_reply_fd:
                self._read(self.ranks_by_reply_fd[fd])
        if dead:
            self._break(self.processes[dead[0]].death(dead[0]))

    def _read(self, rank: int) -> None:
        for data in self.readers[rank].wait():
            match self.decode(data):
                case Stepped(result):
                    self.results.append(result)
                case Failure() as failure:
                    self._break(failure.error())
                case reply:
                    self.replies[rank].append(reply)

    def _break(self, error: QuireError) -> NoReturn:
        self.problem = f"the engine cannot go on after an error: {error}"
        raise error

    def _name(self, rank: int) -> str:
        parallel = self.config.parallel
        stage, place = divmod(rank, parallel.tensor_parallel_size)
        return f"worker {rank} (stage {stage}, place {place})" if parallel.num_workers > 1 else "the worker"


class _Pending:
    def __init__(self, executor: MultiprocExecutor, step_id: int) -> None:
        self.executor = executor
        self.step_id = step_id

    def result(self) -> StepResult:
        return self.executor.next_result(self.step_id)


def _poll(fds: list[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


EXECUTOR = MultiprocExecutor
