"""Microbenchmark of exchange between CPU workers: `python benchmarks/ranks.py [--ranks 2] [--threads 1]`.

Prints microseconds per sum of bfloat16 rows: through shared memory as layers call it, the same replayed from a tape,
and beside it torch's all-reduce with gloo; then a gather of float32 logits. A process per rank, 60 sums at a time as in
a step of a 30-layer model, the fastest tenth of all times: whoever shares the machine interrupts the others.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch

from quire.distributed.shared_memory import SharedMemoryGroup
from quire.ops.cpu.tape import Recording
from quire.utils.shared_memory import GROUP_SLOT_BYTES, group_memory

ROWS = (1, 4, 16, 64, 128, 512, 2048)
SUMS_PER_STEP = 60
SECONDS_PER_CASE = 0.5


def us_per_call(call: Callable[[], object], group: SharedMemoryGroup) -> float:
    """All ranks must make as many calls: the slowest says when it is enough."""
    times = []
    total_s, is_enough = 0.0, torch.zeros(1, 1)
    while not is_enough.item():
        group.sum(torch.zeros(1, 1))  # all begin together
        start = time.perf_counter()
        for _ in range(SUMS_PER_STEP):
            call()
        times.append((time.perf_counter() - start) / SUMS_PER_STEP * 1e6)
        total_s += time.perf_counter() - start
        is_enough = group.sum(torch.full((1, 1), float(total_s > SECONDS_PER_CASE)))
    return sorted(times)[len(times) // 10]


def run(rank: int, args: argparse.Namespace, fd: int, store: str) -> None:
    torch.set_num_threads(args.threads)
    if args.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(rank * args.threads + i) % len(cores)] for i in range(args.threads)})
    group = SharedMemoryGroup(fd, rank, args.ranks)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    x_TD = torch.zeros(2, args.width, dtype=torch.bfloat16)
    with Recording() as recording:
        out_TD = torch.empty_like(x_TD)
        group.sum(out_TD)
    tape = recording.tape(out_TD, max(ROWS))
    if rank == 0:
        print(f"{args.ranks} ranks, {args.threads} threads each, {args.width} wide: microseconds per sum")
        print(f"{'rows':>6} {'called':>9} {'replayed':>9} {'gloo':>9}")
    for rows in ROWS:
        x_TD = torch.zeros(rows, args.width, dtype=torch.bfloat16)
        cases = [partial(group.sum, x_TD), partial(tape.play, rows), partial(torch.distributed.all_reduce, x_TD)]
        times = [us_per_call(case, group) for case in cases]
        if rank == 0:
            print(f"{rows:>6} " + " ".join(f"{us:>9.1f}" for us in times), flush=True)
    widths = [49152 // args.ranks] * args.ranks
    for rows in (1, 64):
        logits = torch.zeros(rows, widths[rank])
        us = us_per_call(partial(group.gather, logits, widths), group)
        if rank == 0:
            print(f"gather of [{rows}, {sum(widths)}] float32: {us:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--pin", action="store_true", help="each rank to cores of its own")
    parser.add_argument("--width", type=int, default=576, help="of a row")
    parser.add_argument("--slot-bytes", type=int, default=GROUP_SLOT_BYTES)
    args = parser.parse_args()
    fd = group_memory(args.ranks, args.slot_bytes)
    context = multiprocessing.get_context("fork")  # which passes the descriptor on
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run, args=(r, args, fd, os.path.join(folder, "store"))) for r in range(args.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
