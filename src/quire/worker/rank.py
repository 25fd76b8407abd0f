"""A worker that is one of several, or lives in a process of its own: what it does with what it is told.

Loads its part of the model, then carries out commands in the order in which they come, as an executor's own calls
would be. How commands reach it is known to `process.py` (rings) and `remote.py` (Ray), not here.
"""

import importlib
import logging
import os
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quire.config import EngineConfig, resolved
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
    RankPlace,
    Reply,
    Sample,
    Sleep,
    Stepped,
    WakeUp,
)
from quire.step import Masks
from quire.utils import child

if TYPE_CHECKING:  # imported when signals are taken care of: this takes a second or two
    from quire.distributed.base import Ranks
    from quire.worker.runner import Pending

log = logging.getLogger(__name__)

WORKER = "quire.worker.worker"


class Rank:
    def __init__(self, setup: RankPlace) -> None:
        self.setup = setup
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(Command).decode
        # On a CPU the launch of a step computes it. Elsewhere the executor says when it waits for one, so that the
        # next can be launched before.
        self.is_done_at_once = setup.config.device.device == "cpu"
        self.launched: deque[Pending] = deque()

    def load(self, ranks: "Ranks") -> Facts:
        self.worker = importlib.import_module(WORKER).Worker(self.setup.config, ranks)
        return self._facts()

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

    def failure(self, error: Exception) -> Failure:
        """The last thing that this rank says."""
        if isinstance(error, QuireError):
            return Failure(type(error).__name__, str(error))
        log.error("this worker failed", exc_info=error)
        first_line = str(error).strip().partition("\n")[0][:200]
        said = f"worker {self.setup.rank} failed ({type(error).__name__}: {first_line}): the log has more"
        return Failure("EngineError", said)


def pin(config: EngineConfig, place: int, count: int) -> None:
    """Ranks that wait for each other in every layer must not share a core: each gets its own, if there are enough.

    `count` of them are on this machine, of which this is number `place`.
    """
    if config.device.device != "cpu" or count == 1:
        return
    cores, num_threads = sorted(os.sched_getaffinity(0)), resolved(config.device.num_threads)
    if count * num_threads <= len(cores):
        os.sched_setaffinity(0, cores[place * num_threads : (place + 1) * num_threads])
