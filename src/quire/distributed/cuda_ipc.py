"""Exchange between processes whose GPUs can read each other's memory, or that share one GPU, through CUDA IPC.

NCCL refuses processes that share a GPU: this is how tensor parallelism is tried on a single one (`benchmarks/
shared_card.py`). Every rank reads the others' buffers in one kernel (`ops/ranks/triton.py`), which can be recorded in
CUDA graphs. Handles of the buffers go through a store of torch's, as msgpack in hexadecimal digits.
"""

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from quire.distributed.base import Group
from quire.ops.ranks.triton import buffers, sum_into


class CudaIpcGroup(Group):
    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        device = torch.device("cuda", torch.cuda.current_device())
        own = buffers(device)
        self.rounds = torch.zeros_like(own[1])  # of each program of a kernel
        torch.cuda.synchronize()  # the others may read
        store.set(f"buffers of {rank}", msgspec.msgpack.encode([_handle(tensor) for tensor in own]).hex())
        # Kept, because the memory is mapped for as long as they live.
        self.opened = [own if other == rank else _opened(store, other, own) for other in range(size)]
        addresses = [[tensor.data_ptr() for tensor in of_rank] for of_rank in self.opened]
        self.buffers, self.flags = torch.tensor(addresses, device=device).t().contiguous()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        sum_into(x, self.buffers, self.flags, self.rounds, self.rank)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Adds up rows in which all but a rank's own part is zero."""
        whole = x.new_zeros(len(x), sum(widths))
        start = sum(widths[: self.rank])
        whole[:, start : start + widths[self.rank]] = x
        return self.sum(whole)


def _handle(tensor: Tensor) -> list[int | bytes | bool]:
    """What another process needs to open the tensor's memory, of which it is the whole."""
    return list(tensor.untyped_storage()._share_cuda_())


def _opened(store: dist.Store, rank: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The buffers of another rank, as tensors of this process."""
    handles = msgspec.msgpack.decode(bytes.fromhex(store.get(f"buffers of {rank}").decode()))
    storages = [UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle[1:]) for handle in handles]
    return tuple(tensor.new_empty(0).set_(storage) for tensor, storage in zip(like, storages, strict=True))
