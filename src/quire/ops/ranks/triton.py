"""Sums over processes whose buffers lie on GPUs that can read each other's memory, in one kernel.

Called by `distributed/cuda_ipc.py`. Each program of a kernel has its own part of the tensor, of every rank's buffer and
of every rank's flags: it writes its rank's numbers, raises its flag, and waits for the same program of the others. Two
halves of a buffer take turns: whoever writes a half again knows by the flags that all have read it. There is no twin in
plain torch: what it does is adding up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a program
MAX_PROGRAMS = 2048
NUMBER_BYTES = 4  # at most
HALF_BYTES = MAX_PROGRAMS * BLOCK * NUMBER_BYTES


def buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    """(bytes, flags) of a rank, which all ranks read."""
    flags = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
    return torch.zeros(2 * HALF_BYTES, dtype=torch.uint8, device=device), flags


def sum_into(x: Tensor, buffer_addresses: Tensor, flag_addresses: Tensor, rounds: Tensor, rank: int) -> None:
    """`x` becomes the sum of all ranks' `x`, added up in the order of ranks. The rounds begin with zeros."""
    if x.itemsize > NUMBER_BYTES or not x.is_contiguous():
        raise ValueError(f"a sum of {x.dtype} over ranks, in {list(x.stride())} steps")
    flat = x.view(-1)
    most = MAX_PROGRAMS * BLOCK
    for start in range(0, len(flat), most):
        part = flat[start : start + most]
        _sum[(triton.cdiv(len(part), BLOCK),)](
            part,
            buffer_addresses,
            flag_addresses,
            rounds,
            len(part),
            RANK=rank,
            NUM_RANKS=len(buffer_addresses),
            BLOCK=BLOCK,
            STRIDE=BLOCK * NUMBER_BYTES // x.itemsize,
            HALF=HALF_BYTES // x.itemsize,
        )


@triton.jit
def _sum(
    x,
    buffer_addresses,
    flag_addresses,
    rounds,
    count,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,  # between programs in a buffer: the same bytes, whatever the type
    HALF: tl.constexpr,
):
    program = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    is_there = program * BLOCK + numbers < count
    own = x + program * BLOCK + numbers
    this_round = tl.load(rounds + program) + 1
    place = (this_round % 2) * HALF + program * STRIDE + numbers
    buffer = tl.load(buffer_addresses + RANK).to(tl.pointer_type(x.dtype.element_ty))
    tl.store(buffer + place, tl.load(own, mask=is_there), mask=is_there)
    tl.debug_barrier()  # all threads have written
    flag = tl.load(flag_addresses + RANK).to(tl.pointer_type(tl.int32)) + program
    tl.atomic_xchg(flag, this_round, sem="release", scope="sys")
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        flag = tl.load(flag_addresses + rank).to(tl.pointer_type(tl.int32)) + program
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen - this_round < 0:  # also after the largest number
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()  # no thread reads before
        buffer = tl.load(buffer_addresses + rank).to(tl.pointer_type(x.dtype.element_ty))
        total += tl.load(buffer + place, mask=is_there, other=0.0, volatile=True).to(tl.float32)
    tl.store(own, total.to(x.dtype.element_ty), mask=is_there)
    tl.store(rounds + program, this_round)
