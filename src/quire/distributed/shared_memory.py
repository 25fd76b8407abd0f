"""Exchange between worker processes on CPUs, through shared memory.

Made by the worker, of descriptors that the core made (`utils/shared_memory.py`) and passed on. Calls are compiled
(`ops/ranks/cpu.py`), so they can be recorded on a tape, which must not outlive the group or link it was recorded with.
Whoever waits sleeps until the others come: that one of them has died is for the core to see.
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from quire.distributed.base import Group, Link
from quire.errors import ConfigError
from quire.ops.ranks import cpu
from quire.utils.shared_memory import GROUP, LINE_BYTES, LINK, Layout, map_shared


class _Mapping:
    """Mapped for as long as this object lives."""

    def __init__(self, fd: int, kind: bytes) -> None:
        if not cpu.available():
            raise ConfigError(
                "tensor and pipeline parallelism on CPUs need a C++ compiler: install g++ (or name one in CXX), "
                "and do not set QUIRE_NATIVE=0"
            )
        mapped, layout = map_shared(fd, kind)
        self._start = ctypes.c_char.from_buffer(mapped)  # which keeps `mapped`
        start = ctypes.addressof(self._start)
        self.layout: Layout = layout
        self.memory = cpu.Memory(start + LINE_BYTES, start + layout.slots_start, layout.slot_bytes)


class SharedMemoryGroup(Group):
    def __init__(self, fd: int, rank: int, size: int) -> None:
        self._mapping = _Mapping(fd, GROUP)
        num_ranks, num_slots = self._mapping.layout.num_flags, self._mapping.layout.num_slots
        if not 0 <= rank < size or num_ranks != size or num_slots != 2 * size:
            raise ValueError(f"rank {rank} of {size} cannot use shared memory that was made for {num_ranks} ranks")
        self.rank, self.size = rank, size
        self._widths: dict[tuple[int, ...], ctypes.Array] = {}  # at addresses that stay

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        cpu.sum_into(x, self._mapping.memory, self.rank, self.size)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        num_bytes = tuple(width * x.itemsize for width in widths)
        if len(num_bytes) != self.size or x.dim() != 2 or x.shape[1] != widths[self.rank]:
            raise ValueError(f"{list(x.shape)} cannot be rank {self.rank}'s part of rows that are {list(widths)} wide")
        if num_bytes not in self._widths:
            self._widths[num_bytes] = (ctypes.c_int64 * self.size)(*num_bytes)
        x = x if x.stride(1) == 1 else x.contiguous()
        return cpu.gather(x, self._widths[num_bytes], self._mapping.memory, self.rank, self.size)


class SharedMemoryLink(Link):
    def __init__(self, fd: int) -> None:
        self._mapping = _Mapping(fd, LINK)
        self._num_slots = self._mapping.layout.num_slots

    def send(self, x: Tensor) -> None:
        cpu.send(x.contiguous(), self._mapping.memory, self._num_slots)

    def receive(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise ValueError("what is received must be contiguous in memory")
        cpu.receive(x, self._mapping.memory, self._num_slots)
