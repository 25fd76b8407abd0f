"""Sums, rows side by side, and a ring from process to process, through shared memory that all have mapped.

Called by `distributed/shared_memory.py`, which maps the memory, asks `available()` first, and gives contiguous tensors.
There is no twin in torch: without a compiler there is one process. Calls are recorded on tapes, so memory and `widths`
must stay where they are for as long as a tape is played.
"""

import ctypes
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from quire.ops.cpu.tape import Rows, compiled

_PTR, _INT = ctypes.c_void_p, ctypes.c_int64
_MEMORY = [_PTR, _PTR, _INT, ctypes.c_int]
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # what can be added, as the kernels call it


@dataclass(frozen=True)
class Memory:
    """Addresses in a mapping laid out by `utils/shared_memory.py`."""

    flags: int
    slots: int
    slot_bytes: int


@functools.cache
def _kernels() -> SimpleNamespace:
    return compiled(
        "ranks",
        sum=[ctypes.c_int, *_MEMORY, ctypes.c_int, _PTR, Rows, _INT],
        gather=[*_MEMORY, ctypes.c_int, _PTR, _PTR, _INT, _PTR, Rows],
        send=[*_MEMORY, _PTR, Rows, _INT],
        receive=[*_MEMORY, _PTR, Rows, _INT],
    )


def available() -> bool:
    return _kernels().available


def sum_into(x: Tensor, memory: Memory, rank: int, size: int) -> None:
    """x becomes the sum of all ranks' x, added in their order in float32, rounded once: the same bits everywhere."""
    rows, width = _rows_and_width(x)
    flags, slots, slot_bytes = memory.flags, memory.slots, memory.slot_bytes
    _kernels().sum(TYPES[x.dtype], flags, slots, slot_bytes, rank, size, x.data_ptr(), rows, width)


def gather(x_SX: Tensor, widths: ctypes.Array[ctypes.c_int64], memory: Memory, rank: int, size: int) -> Tensor:
    """All ranks' rows, side by side. `widths`: the bytes of each rank's row."""
    rows = len(x_SX)
    out = x_SX.new_empty(rows, sum(widths) // x_SX.itemsize)
    stride = x_SX.stride(0) * x_SX.itemsize
    addresses = out.data_ptr(), x_SX.data_ptr(), stride, ctypes.addressof(widths)
    _kernels().gather(memory.flags, memory.slots, memory.slot_bytes, rank, size, *addresses, rows)
    return out


def send(x: Tensor, memory: Memory, num_slots: int) -> None:
    """Returns once x is copied: waits only while the ring is full."""
    rows, width = _rows_and_width(x)
    ring = memory.flags, memory.slots, memory.slot_bytes, num_slots
    _kernels().send(*ring, x.data_ptr(), rows, width * x.itemsize)


def receive(x: Tensor, memory: Memory, num_slots: int) -> None:
    """Fills x with what was sent."""
    rows, width = _rows_and_width(x)
    ring = memory.flags, memory.slots, memory.slot_bytes, num_slots
    _kernels().receive(*ring, x.data_ptr(), rows, width * x.itemsize)


def _rows_and_width(x: Tensor) -> tuple[int, int]:
    rows = x.shape[0]
    return rows, x.numel() // rows if rows else 0
