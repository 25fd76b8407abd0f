"""The structs that an executor and its worker processes exchange.

Commands go to all ranks, through one ring; each rank answers through a ring of its own. A step is two commands, as it
is two launches: only the rank that samples answers with what it gave. Built by `executor/multiproc.py`, carried out by
`worker/process.py`.
"""

import msgspec

from quire import errors
from quire.config import EngineConfig
from quire.errors import EngineError, QuireError
from quire.kv.specs import CacheSpec, KVLayout
from quire.step import Masks, StepPlan, StepResult
from quire.utils.ring import RingFds


class SharedFds(msgspec.Struct):
    """Descriptors through which a rank reaches others."""

    group: int | None = None  # memory that the ranks of the stage share
    before: int | None = None  # memory of the link to the stage before
    after: int | None = None
    store: int | None = None  # the file in which ranks that have GPUs find each other

    def all(self) -> list[int]:
        return [fd for fd in (self.group, self.before, self.after, self.store) if fd is not None]


class RankSetup(msgspec.Struct):
    """What a worker process is told when it starts, over its standard input, with the descriptors named here."""

    config: EngineConfig
    rank: int  # stage * tensor_parallel_size + place in the group that divides the stage's layers
    commands: RingFds  # this rank's end
    replies: RingFds
    shared: SharedFds
    path: list[str] = []  # where modules are found: a user's own may lie beside the program that started all this

    @property
    def stage(self) -> int:
        return self.rank // self.config.parallel.tensor_parallel_size

    @property
    def place(self) -> int:
        return self.rank % self.config.parallel.tensor_parallel_size

    @property
    def answers_steps(self) -> bool:
        return self.rank == answering_rank(self.config)

    def fds(self) -> list[int]:
        """All descriptors, in the order in which they are sent."""
        return [*self.commands.all(), *self.replies.all(), *self.shared.all()]

    def received(self, fds: list[int]) -> "RankSetup":
        """The same with the receiver's descriptors, which have other numbers."""
        own: dict[int | None, int] = dict(zip(self.fds(), fds, strict=True))

        def ring(sent: RingFds) -> RingFds:
            return RingFds(
                own[sent.memory], tuple(own[fd] for fd in sent.written), tuple(own[fd] for fd in sent.released)
            )

        return msgspec.structs.replace(
            self,
            commands=ring(self.commands),
            replies=ring(self.replies),
            shared=SharedFds(*(own.get(fd) for fd in msgspec.structs.astuple(self.shared))),
        )


def answering_rank(config: EngineConfig) -> int:
    """All ranks of the last stage choose the same tokens: the first of them tells."""
    parallel = config.parallel
    return (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size


class CountBlocks(msgspec.Struct, array_like=True, tag="count_blocks"):
    layout: KVLayout


class Allocate(msgspec.Struct, array_like=True, tag="allocate"):
    layout: KVLayout


class Forward(msgspec.Struct, array_like=True, tag="forward", gc=False):
    plan: StepPlan
    is_sampled: bool = False  # at once, as if a Sample without masks followed


class Sample(msgspec.Struct, array_like=True, tag="sample", gc=False):
    masks: Masks | None = None


class Collect(msgspec.Struct, array_like=True, tag="collect", gc=False):
    """Asks to wait for the oldest step that was launched. On CPUs, where a launch computes, this is not needed."""


class Sleep(msgspec.Struct, array_like=True, tag="sleep"):
    keep_weights: bool


class WakeUp(msgspec.Struct, array_like=True, tag="wake_up"):
    pass


Command = CountBlocks | Allocate | Forward | Sample | Collect | Sleep | WakeUp


class Facts(msgspec.Struct, array_like=True, tag="facts"):
    """What a rank says by itself when its model is loaded."""

    kv_specs: dict[str, CacheSpec]
    weight_bytes: int
    num_drafts: int
    num_ahead: int
    draft_cost: float


class Blocks(msgspec.Struct, array_like=True, tag="blocks"):
    num_blocks: list[int]  # of each pool


class Allocated(msgspec.Struct, array_like=True, tag="allocated"):
    num_graphs: int  # that are recorded before the first step


class Done(msgspec.Struct, array_like=True, tag="done"):
    pass


class Stepped(msgspec.Struct, array_like=True, tag="stepped", gc=False):
    result: StepResult


class Failure(msgspec.Struct, array_like=True, tag="failure"):
    """The last thing a rank says; `kind` names an exception of errors.py."""

    kind: str
    message: str

    def error(self) -> QuireError:
        return getattr(errors, self.kind, EngineError)(self.message)


Reply = Facts | Blocks | Allocated | Done | Stepped | Failure
