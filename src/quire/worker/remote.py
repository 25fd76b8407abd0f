"""A worker on a machine of a cluster: how it finds the others, wherever these are.

Made by the actor of `executor/_actor.py`; from then on it carries out the commands of its channel (`rank.py`). Ranks on
one machine exchange through shared memory, as those of `process.py`; others through gloo, or NCCL if they have GPUs.
"""

import os

import msgspec
import torch.distributed as dist

from quire import env
from quire.config import resolved
from quire.distributed.base import ALONE, Group, Link, Ranks
from quire.distributed.gloo import GlooGroup, GlooLink
from quire.distributed.shared_memory import SharedMemoryGroup, SharedMemoryLink
from quire.distributed.store import open_store, reach_store
from quire.ops.ranks import cpu
from quire.ranks import Facts, Failure, NodeSetup, Offer, Reply
from quire.utils import child
from quire.utils.channel import ChannelClient
from quire.utils.network import interface_of
from quire.utils.shared_memory import group_memory, link_memory
from quire.worker.rank import Rank, pin

LAST_WORDS_S = 5.0  # for a failure to reach the executor


class RemoteRank(Rank):
    setup: NodeSetup

    def __init__(self, setup: bytes) -> None:
        told = msgspec.msgpack.decode(setup, type=NodeSetup)
        env.set_log_level(told.log_level)
        child.end_with_parent(os.getppid())  # Ray's own process of this machine: Ray itself would take seconds
        child.log_as(f"worker {told.rank}")
        super().__init__(_with_threads(told))
        self.store: dist.TCPStore | None = None

    def open(self) -> bytes:
        """Opens what others need of this rank: an `Offer`, or a `Failure`."""
        try:
            offer: Offer | Failure = self._opened()
        except Exception as error:
            offer = self.failure(error)
        return self.encode(offer)

    def run(self, offers: bytes) -> None:
        """Connects to all ranks, whose offers these are, loads, and carries out commands until one fails."""
        self.channel = ChannelClient(self.setup.channel)
        try:
            self._send(self._joined(msgspec.msgpack.decode(offers, type=list[Offer])))
            while True:
                reply = self.carry_out(self.decode(self.channel.receive()))
                if reply is not None:
                    self._send(reply)
        except Exception as error:
            self._send(self.failure(error))
            self.channel.close(LAST_WORDS_S)

    def _send(self, reply: Reply) -> None:
        self.channel.send(self.encode(reply))

    # -- finding the others ----------------------------------------------------------------------------------------

    def _opened(self) -> Offer:
        setup, parallel = self.setup, self.setup.config.parallel
        offer = Offer(os.getpid())
        if parallel.num_workers == 1:
            return offer
        if setup.rank == 0:
            self.store, offer.store_port = open_store(setup.node.address)
        if setup.config.device.device != "cpu" or not cpu.available():
            return offer
        size = parallel.tensor_parallel_size
        if size > 1 and setup.place == 0 and setup.is_near(setup.stage_ranks()):
            offer.group_fd = group_memory(size)
        if setup.stage < parallel.pipeline_parallel_size - 1 and setup.is_near([setup.rank + size]):
            offer.after_fd = link_memory()
        return offer

    def _joined(self, offers: list[Offer]) -> Facts:
        setup = self.setup
        neighbours = setup.neighbours
        pin(setup.config, neighbours.index(setup.rank), len(neighbours))
        if setup.config.parallel.num_workers == 1:
            return self.load(ALONE)
        if self.store is None:
            self.store = reach_store(setup.nodes[0].address, offers[0].store_port)
        store = dist.PrefixStore(setup.prefix, self.store)
        return self.load(_on_cpus(setup, offers, store) if self.is_done_at_once else _on_gpus(setup, store))


def _with_threads(setup: NodeSetup) -> NodeSetup:
    """Ranks on one machine divide its cores: how many it has is known here only."""
    share = max(1, len(os.sched_getaffinity(0)) // len(setup.neighbours))
    num_threads = min(resolved(setup.config.device.num_threads), share)
    return msgspec.structs.replace(setup, config=setup.config.replace(num_threads=num_threads))


def _on_cpus(setup: NodeSetup, offers: list[Offer], store: dist.Store) -> Ranks:
    parallel, address = setup.config.parallel, setup.node.address
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size

    def link(sender: int) -> Link:
        offer = offers[sender]
        if offer.after_fd >= 0:
            return SharedMemoryLink(_own(offer.pid, offer.after_fd))
        return GlooLink(dist.PrefixStore(f"link {sender}", store), address, is_sender=sender == setup.rank)

    # Links in the order of stages, so that no two wait for each other.
    before = link(setup.rank - size) if setup.stage else None
    after = link(setup.rank) if setup.stage < num_stages - 1 else None
    group, offer = Group(), offers[setup.stage_ranks()[0]]
    if size > 1 and offer.group_fd >= 0:
        group = SharedMemoryGroup(_own(offer.pid, offer.group_fd), setup.place, size)
    elif size > 1:
        group = GlooGroup(dist.PrefixStore(f"stage {setup.stage}", store), address, setup.place, size)
    return Ranks(group, setup.stage, num_stages, before, after)


def _own(pid: int, fd: int) -> int:
    """A descriptor of what another process on this machine has open."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _on_gpus(setup: NodeSetup, store: dist.Store) -> Ranks:
    """Ray shows each of its processes one GPU."""
    from quire.distributed import nccl

    parallel = setup.config.parallel
    if setup.is_near(list(range(parallel.num_workers))):
        env.keep_nccl_local()
    elif (interface := interface_of(setup.node.address)) is not None:
        env.name_nccl_interface(interface)
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return nccl.join(store, setup.rank, size, num_stages, device_idx=0)
