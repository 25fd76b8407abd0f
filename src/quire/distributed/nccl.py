"""Exchange between worker processes that have a GPU each, through NCCL.

Made by the worker. On one machine ranks find each other in a file without a name, of which the core passed them the
descriptor, so nothing of ours listens on a port, and NCCL's own sockets are bound to the loopback interface; on several
they find each other in a store (`store.py`). Calls are launched like kernels, so they can be recorded in CUDA graphs;
communicators are made before, by a first exchange. One rank alone works, too, and computes what it would without.
"""

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quire import env
from quire.distributed.base import Group, Link, Ranks
from quire.errors import ConfigError

# An exchange that takes longer has failed. Whoever waits for a rank that died is killed by the core long before.
TIMEOUT = datetime.timedelta(minutes=30)


class NcclGroup(Group):
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.sum(torch.zeros(1, device="cuda"))  # makes the communicator, which cannot be done while recording

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if len(widths) != self.size or x.dim() != 2 or x.shape[1] != widths[self.rank]:
            raise ValueError(f"{list(x.shape)} cannot be rank {self.rank}'s part of rows that are {list(widths)} wide")
        num_rows, widest = len(x), max(widths)
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = x.new_empty(self.size, num_rows, widest)
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self.group)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths)], dim=1)


class NcclLink(Link):
    """`group` has two ranks, the first of which sends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        first = torch.zeros(1, device="cuda")
        self.send(first) if group.rank() == 0 else self.receive(first)

    def send(self, x: Tensor) -> None:
        dist.send(x.contiguous(), group=self.group, group_dst=1)

    def receive(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise ValueError("what is received must be contiguous in memory")
        dist.recv(x, group=self.group, group_src=0)


def connect(store_fd: int, rank: int, size: int, num_stages: int, first_device: int = 0) -> Ranks:
    """The place of `rank` among `size * num_stages`, each of which calls this with the same file, on its own GPU.

    `first_device`: the number of rank 0's."""
    world_size = size * num_stages
    needed = first_device + world_size
    if torch.cuda.device_count() < needed:
        raise ConfigError(
            f"{needed} workers need as many GPUs, and {torch.cuda.device_count()} can be seen: lower "
            "--tensor-parallel-size or --pipeline-parallel-size, or look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    env.keep_nccl_local()
    store = dist.FileStore(f"/proc/self/fd/{store_fd}", world_size)
    return join(store, rank, size, num_stages, device_idx=first_device + rank)


def join(store: dist.Store, rank: int, size: int, num_stages: int, device_idx: int) -> Ranks:
    """The place of `rank` among `size * num_stages`, each of which calls this with the same store."""
    world_size = size * num_stages
    torch.cuda.set_device(device_idx)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    stage, place = divmod(rank, size)
    groups = [_group(range(first, first + size), rank) for first in range(0, world_size, size)]
    links = [_group([first, first + size], rank) for first in range(world_size - size)]
    own = groups[stage]
    before = links[rank - size] if stage else None
    after = links[rank] if stage < num_stages - 1 else None
    return Ranks(
        Group() if own is None or size == 1 else NcclGroup(own),
        stage,
        num_stages,
        None if before is None else NcclLink(before),
        None if after is None else NcclLink(after),
        device_idx=device_idx,
    )


def _group(members: Sequence[int], rank: int) -> dist.ProcessGroup | None:
    """Every rank must make every group, in the same order; None: without this one."""
    group = dist.new_group(list(members), timeout=TIMEOUT)
    return group if rank in members else None
