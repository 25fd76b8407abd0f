"""The structs that an executor and its worker processes exchange.

Commands go to all ranks, and each rank answers for itself. A step is two commands, as it is two launches: only the
rank that samples answers with what it gave. Built by `executor/_remote.py`, carried out by `worker/rank.py`, carried
from one to the other by rings on one machine (`RankSetup`), by an encrypted channel in a cluster (`NodeSetup`).
"""

import msgspec

from quire import errors
from quire.config import EngineConfig
from quire.errors import EngineError, QuireError
from quire.kv.specs import CacheSpec, KVLayout
from quire.step import Masks, StepPlan, StepResult
from quire.utils.channel import ChannelEnd
from quire.utils.ring import RingFds


class SharedFds(msgspec.Struct):
    """Descriptors through which a rank reaches others."""

    group: int | None = None  # memory that the ranks of the stage share
    before: int | None = None  # memory of the link to the stage before
    after: int | None = None
    store: int | None = None  # the file in which ranks that have GPUs find each other

    def all(self) -> list[int]:
        return [fd for fd in (self.group, self.before, self.after, self.store) if fd is not None]


class RankPlace(msgspec.Struct, kw_only=True):
    """Which worker one is."""

    config: EngineConfig
    rank: int  # stage * tensor_parallel_size + place in the group that divides the stage's layers

    @property
    def stage(self) -> int:
        return self.rank // self.config.parallel.tensor_parallel_size

    @property
    def place(self) -> int:
        return self.rank % self.config.parallel.tensor_parallel_size

    @property
    def answers_steps(self) -> bool:
        return self.rank == answering_rank(self.config)


class RankSetup(RankPlace, kw_only=True):
    """What a worker process is told when it starts, over its standard input, with the descriptors named here."""

    commands: RingFds  # this rank's end
    replies: RingFds
    shared: SharedFds
    path: list[str] = []  # where modules are found: a user's own may lie beside the program that started all this

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


class RankNode(msgspec.Struct, frozen=True):
    """The machine that a rank of a cluster is on."""

    node_id: str
    address: str


class NodeSetup(RankPlace, kw_only=True):
    """What a rank is told that runs on some machine of a cluster."""

    nodes: list[RankNode]  # by rank
    channel: ChannelEnd  # where commands come from
    prefix: str  # of all keys of the store in which ranks find each other: nobody else knows it
    log_level: str

    @property
    def node(self) -> RankNode:
        return self.nodes[self.rank]

    @property
    def neighbours(self) -> list[int]:
        """The ranks on the same machine, this one included."""
        return [rank for rank, node in enumerate(self.nodes) if node.node_id == self.node.node_id]

    def stage_ranks(self) -> list[int]:
        """Those that divide the layers of this one's stage."""
        size = self.config.parallel.tensor_parallel_size
        return list(range(self.stage * size, (self.stage + 1) * size))

    def is_near(self, ranks: list[int]) -> bool:
        return all(self.nodes[rank].node_id == self.node.node_id for rank in ranks)


class Offer(msgspec.Struct, array_like=True, tag="offer"):
    """What a rank of a cluster has opened for others."""

    pid: int
    store_port: int = 0  # of the store, which the first rank keeps
    group_fd: int = -1  # memory for the ranks of its stage, if all are on its machine
    after_fd: int = -1  # memory of the link to the next stage, if that is on its machine


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
