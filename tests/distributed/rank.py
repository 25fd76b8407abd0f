"""A process that is a rank of groups and an end of links, and does what a test asks it to: `Ranks` starts several."""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from quire.distributed.shared_memory import SharedMemoryGroup, SharedMemoryLink
from quire.ops.cpu.tape import Recording
from quire.utils.shared_memory import group_memory, link_memory

SLOT_BYTES = 4096  # of the link, and of groups but the first
ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
Shape = tuple[int, ...]


class Ranks:
    """As many processes, and the memory between them; `with Ranks(3) as ranks: ranks.all("sums", size=2, ...)`.

    Groups: one of the first n for each n from 2 on. There is a link from rank 0 to rank 1.
    """

    def __init__(self, count: int) -> None:
        groups = [group_memory(size, SLOT_BYTES) for size in range(3, count + 1)]
        memory = [link_memory(SLOT_BYTES), group_memory(2), *groups]
        self.processes, self.connections = [], []
        for rank in range(count):
            ours, theirs = Pipe()
            fds = [theirs.fileno(), *memory]
            command = [sys.executable, "-m", "tests.distributed.rank", *map(str, (rank, *fds))]
            self.processes.append(subprocess.Popen(command, pass_fds=fds, cwd=ROOT))
            self.connections.append(ours)
            theirs.close()
        for fd in memory:
            os.close(fd)

    def ask(self, rank: int, task: str, **arguments: Any) -> None:
        self.connections[rank].send((task, arguments))

    def answer(self, rank: int, timeout_s: float = 120) -> Any:
        assert self.connections[rank].poll(timeout_s), f"rank {rank} does not answer"
        return self.connections[rank].recv()

    def has_answered(self, rank: int, within_s: float) -> bool:
        return self.connections[rank].poll(within_s)

    def all(self, task: str, size: int, **arguments: Any) -> list[Any]:
        """What the first `size` ranks answer."""
        for rank in range(size):
            self.ask(rank, task, size=size, **arguments)
        return [self.answer(rank) for rank in range(size)]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for connection in self.connections:
            connection.close()


class Rank:
    """What runs in such a process. Its public methods are the tasks."""

    def __init__(self, rank: int, link_fd: int, *group_fds: int) -> None:
        self.rank = rank
        self.groups = {size: SharedMemoryGroup(fd, rank, size) for size, fd in enumerate(group_fds, 2) if rank < size}
        self.link = SharedMemoryLink(link_fd)

    def sums(self, size: int, shape: Shape, dtype: str, threads: int = 1, late: int = -1) -> tuple[str, str]:
        """(what came out, what must have come out)"""
        x = _part(self.rank, shape, dtype)
        time.sleep(0.05 if self.rank == late else 0)
        torch.set_num_threads(threads)
        out = self.groups[size].sum(x)
        torch.set_num_threads(1)
        return _digest(out), _digest(_sum_of_parts(size, shape, dtype))

    def special(self, size: int) -> list[float]:
        """Infinities, NaN, a sum that is too large, and a negative zero, in a vector and behind it."""
        inf, nan = float("inf"), float("nan")
        mine = torch.tensor([[inf, inf if self.rank else -inf, nan if self.rank else 1.0, 3e38, -0.0]]).repeat(1, 4)
        return self.groups[size].sum(mine.bfloat16()).flatten().tolist()

    def rounds(self, size: int, count: int) -> int:
        """How many of so many sums were right; now and then one rank is late."""
        num_right, x = 0, torch.empty(1, 24)
        for i in range(count):
            if i % 1000 == 500 + self.rank:
                time.sleep(0.002)
            x.fill_(i + self.rank)
            num_right += self.groups[size].sum(x).sum().item() == 24 * (size * i + size * (size - 1) / 2)
        return num_right

    def replay(self, size: int, width: int, rows: list[int]) -> list[tuple[str, str]]:
        with Recording() as recording:
            out = self.groups[size].sum(torch.empty(2, width, dtype=torch.bfloat16))
        tape = recording.tape(out, max_rows=max(rows))
        results = []
        for num_rows in rows:
            shape = num_rows, width
            tape.output[:num_rows] = _part(self.rank, shape, "bfloat16", seed=num_rows)
            expected = _sum_of_parts(size, shape, "bfloat16", seed=num_rows)
            results.append((_digest(tape.play(num_rows)), _digest(expected)))
        return results

    def gathers(self, size: int, rows: int, widths: list[int], dtype: str, is_strided: bool = False) -> bool:
        parts = [_part(of, (rows, width), dtype) for of, width in enumerate(widths)]
        mine = parts[self.rank]
        if is_strided:
            mine = torch.cat((mine, mine), 1)[:, : mine.shape[1]]
        return torch.equal(self.groups[size].gather(mine, widths), torch.cat(parts, 1))

    def sends(self, shapes: list[Shape], pause_s: float = 0.0) -> None:
        for seed, shape in enumerate(shapes):
            x = _part(0, shape, "bfloat16", seed)
            self.link.send(x)
            x.zero_()  # it may be overwritten then
            time.sleep(pause_s)

    def receives(self, shapes: list[Shape], pause_s: float = 0.0) -> bool:
        all_right = True
        for seed, shape in enumerate(shapes):
            x = torch.empty(shape, dtype=torch.bfloat16)
            self.link.receive(x)
            all_right &= torch.equal(x, _part(0, shape, "bfloat16", seed))
            time.sleep(pause_s)
        return all_right

    def timed_sum(self, size: int) -> tuple[float, float, float]:
        """(the sum, seconds, seconds of CPU)"""
        start, cpu_start = time.monotonic(), time.process_time()
        total = self.groups[size].sum(torch.ones(1, 1)).item()
        return total, time.monotonic() - start, time.process_time() - cpu_start


def _part(rank: int, shape: Shape, dtype: str, seed: int = 0) -> torch.Tensor:
    """What a rank has: numbers of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-8, 8, shape, generator=generator))
    return x.to(getattr(torch, dtype))


def _sum_of_parts(size: int, shape: Shape, dtype: str, seed: int = 0) -> torch.Tensor:
    total = _part(0, shape, dtype, seed).float()
    for rank in range(1, size):
        total = total + _part(rank, shape, dtype, seed).float()
    return total.to(getattr(torch, dtype))


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever waits for a rank that is gone waits forever
    torch.set_num_threads(1)
    rank, fd, *memory = map(int, sys.argv[1:])
    connection, here = Connection(fd), Rank(rank, *memory)
    while True:
        task, arguments = connection.recv()
        connection.send(getattr(here, task)(**arguments))


if __name__ == "__main__":
    main()
