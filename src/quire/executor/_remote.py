"""What executors have in common whose workers are processes elsewhere: ranks, what they are told, what they answer.

A subclass is a way to reach them: `multiproc.py` by rings in shared memory, `ray.py` by sockets. It sends commands to
all ranks and takes their replies in; which these are is known here (`ranks.py`), what ranks compute is not.
"""

import logging
from abc import abstractmethod
from collections import deque
from typing import NoReturn, TypeVar

import msgspec

from quire.config import EngineConfig, resolved
from quire.errors import EngineError, QuireError
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
    Reply,
    Sample,
    Sleep,
    Stepped,
    WakeUp,
    answering_rank,
)
from quire.step import Masks, StepPlan, StepResult
from quire.utils.child import START_LOG

log = logging.getLogger(START_LOG)

Kind = TypeVar("Kind", Facts, Blocks, Allocated, Done)


class RemoteExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.is_done_at_once = config.device.device == "cpu"  # see `worker/rank.py`
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(Reply).decode
        self._num_graphs = 0
        self._counts: list[list[int]] = []  # of each worker: of how many blocks of each pool there is memory for
        self.problem = ""  # why the workers cannot be used any more
        self.replies: list[deque[Reply]] = [deque() for _ in range(config.parallel.num_workers)]  # to commands, by rank
        self.results: deque[StepResult] = deque()  # of steps
        try:
            self._start()
            self.facts = self._replies(Facts)
        except BaseException:
            self.close()
            raise

    # -- what a subclass does --------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> None:
        """Has the workers start, each of which answers with its `Facts`. `close` may follow at any point of it."""

    @abstractmethod
    def _post(self, command: bytes) -> None:
        """Sends it to all ranks."""

    @abstractmethod
    def _take_in(self) -> None:
        """Sleeps until ranks have answered, or for a while, and gives `_taken` what they said. Raises if one died."""

    def _taken(self, rank: int, data: bytes) -> None:
        match self.decode(data):
            case Stepped(result):
                self.results.append(result)
            case Failure() as failure:
                self._break(failure.error())
            case reply:
                self.replies[rank].append(reply)

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
        self._counts = [reply.num_blocks for reply in self._replies(Blocks)]
        return [min(of_pool) for of_pool in zip(*self._counts)]

    @property
    def num_graphs(self) -> int:
        return self._num_graphs

    def allocate(self, layout: KVLayout) -> None:
        self._send(Allocate(layout))
        self._num_graphs = min(reply.num_graphs for reply in self._replies(Allocated))
        self._log_what_workers_hold(layout)

    def _log_what_workers_hold(self, layout: KVLayout) -> None:
        taken = [pool.num_blocks for pool in layout.pools]
        block_size = resolved(self.config.cache.block_size)
        for rank, facts in enumerate(self.facts):
            counts = self._counts[rank] if self._counts else taken
            log.info(
                "%s: %.0f MB of weights, memory for %s blocks of %d tokens, of which %s are used",
                self._name(rank),
                facts.weight_bytes / 1e6,
                " and ".join(map(str, counts)),
                block_size,
                " and ".join(map(str, taken)),
            )

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
        self._post(self.encode(command))
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
        self._take_in()

    def _break(self, error: QuireError) -> NoReturn:
        self.problem = f"the engine cannot go on after an error: {error}"
        raise error

    def _name(self, rank: int) -> str:
        parallel = self.config.parallel
        stage, place = divmod(rank, parallel.tensor_parallel_size)
        return f"worker {rank} (stage {stage}, place {place})" if parallel.num_workers > 1 else "the worker"


class _Pending:
    def __init__(self, executor: RemoteExecutor, step_id: int) -> None:
        self.executor = executor
        self.step_id = step_id

    def result(self) -> StepResult:
        return self.executor.next_result(self.step_id)
