"""Exchange between workers on the CPUs of several machines, through gloo's sockets.

Made by the worker, of a store that all have (`store.py`). Sums are gathered and added here, in the order of ranks: all
have the same bits, those of `shared_memory.py`. torch adds them, so such a pass is never recorded on a tape
(`ops/cpu/tape.py`). Whoever waits for a rank that dies gets an error when the connection breaks.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.distributed.base import Group, Link
from quire.errors import WorkerDied

# An exchange that takes longer has failed. Whoever waits for a rank that died is killed by the core long before.
TIMEOUT = datetime.timedelta(minutes=30)


class GlooGroup(Group):
    def __init__(self, store: dist.Store, address: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = _connected(store, address, rank, size)

    def sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        parts = self._parts(x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if len(widths) != self.size or x.dim() != 2 or x.shape[1] != widths[self.rank]:
            raise ValueError(f"{list(x.shape)} cannot be rank {self.rank}'s part of rows that are {list(widths)} wide")
        if not len(x) or not any(widths):
            return x.new_empty(len(x), sum(widths))
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        return torch.cat([part[:, :width] for part, width in zip(self._parts(padded), widths)], dim=1)

    def _parts(self, x: Tensor) -> Tensor:
        """Every rank's x, one after the other."""
        parts = x.new_empty(self.size, *x.shape)
        _finish(self._group._allgather_base(_bytes(parts), _bytes(x)))
        return parts


class GlooLink(Link):
    """Two ranks, the first of which sends."""

    def __init__(self, store: dist.Store, address: str, is_sender: bool) -> None:
        self._group = _connected(store, address, 0 if is_sender else 1, 2)

    def send(self, x: Tensor) -> None:
        if x.numel():
            _finish(self._group.send([_bytes(x.contiguous())], 1, 0))

    def receive(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise ValueError("what is received must be contiguous in memory")
        if x.numel():
            _finish(self._group.recv([_bytes(x)], 0, 0))


def _connected(store: dist.Store, address: str, rank: int, size: int) -> Any:
    """A group of torch's, whose sockets listen at this address alone."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = TIMEOUT
    return gloo(store, rank, size, options)


def _bytes(x: Tensor) -> Tensor:
    """gloo moves bytes, whatever they mean."""
    return x.view(-1).view(torch.uint8)


def _finish(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        said = "a worker lost its connection to another one: that one, or its machine, has failed"
        raise WorkerDied(said) from error
