"""Paged attention on the CPU against torch's SDPA on contiguous tensors: python benchmarks/cpu_attention.py.

SDPA is given what a paged cache never has: each layer's keys and values contiguous and of one length, and (for decode)
heads grouped without a copy. Figures are the best of several calls; memory bandwidth counts keys and values read once,
arithmetic two operations per multiply-add of the causal half.
"""

import argparse
import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.ops.attention import cpu as native
from quire.ops.attention import reference as twin
from quire.ops.attention.reference import AttentionTables

BLOCK_SIZE = 16


def best_s(run: Callable[[int], object], num_layers: int, budget_s: float = 0.4) -> float:
    """Seconds of the fastest call, going round the layers so that each finds its cache cold.

    One thread is timed by the CPU time it used: neighbours on the machine then disturb less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best, end, calls = float("inf"), time.perf_counter() + budget_s, 0
    while calls < 3 or time.perf_counter() < end:
        start = clock()
        run(calls % num_layers)
        best, calls = min(best, clock() - start), calls + 1
    return best


def measure(rows: int, queries: int, context: int, args: argparse.Namespace) -> str:
    H, K, D, dtype = args.heads, args.kv_heads, args.head_size, getattr(torch, args.dtype)
    num_blocks = -(-context // BLOCK_SIZE)
    # As many layers as it takes to be bigger than the caches, as in a model: a cache read last step is cold again.
    layer_bytes = rows * num_blocks * BLOCK_SIZE * 2 * K * D * dtype.itemsize
    num_layers = max(1, min(30, args.working_set_mb * 2**20 // layer_bytes))
    table = torch.randperm(rows * num_blocks).int().view(rows, num_blocks)
    tables = AttentionTables(
        torch.arange(rows + 1).int() * queries, torch.full((rows,), context).int(), table, BLOCK_SIZE, queries
    )
    q = torch.randn(rows * queries, H, D).to(dtype)
    cache = torch.randn(rows * num_blocks, 2, BLOCK_SIZE, K, D).to(dtype)
    caches = [cache.clone() for _ in range(num_layers)]
    dense = [cache.view(2, rows, K, num_blocks * BLOCK_SIZE, D)[..., :context, :] for cache in caches]
    q_dense = q.view(rows, queries, H, D).transpose(1, 2)

    grouped = q_dense.reshape(rows, K, H // K, D) if queries == 1 else q_dense

    def sdpa(layer: int) -> object:
        k, v = dense[layer]
        return scaled_dot_product_attention(grouped, k, v, is_causal=queries > 1, enable_gqa=queries > 1)

    def paged(ops: ModuleType) -> float:
        return best_s(lambda layer: ops.paged_attention(q, caches[layer], tables, scale=D**-0.5), num_layers)

    ours, theirs = paged(native), best_s(sdpa, num_layers)
    plain = paged(twin) if args.twin else float("nan")
    flop = 4 * rows * H * D * sum(range(context - queries + 1, context + 1))
    return (
        f"{rows:5} {queries:6} {context:7} {ours * 1e6:10.0f} {theirs * 1e6:10.0f} {theirs / ours:6.2f}x "
        f"{plain * 1e6:10.0f} {layer_bytes / ours / 1e9:8.1f} {flop / ours / 1e9:9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--working-set-mb", type=int, default=300)
    parser.add_argument("--twin", action="store_true", help="time the torch twin too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{args.dtype}, {args.heads}/{args.kv_heads} heads of {args.head_size}, {torch.get_num_threads()} threads")
    print(" rows  query context  native us    sdpa us            twin us     GB/s   GFLOP/s")
    shapes = [(rows, 1, context) for rows in (1, 64) for context in (128, 200, 512, 1024, 4096)]
    for rows, queries, context in (*shapes, *((1, n, n) for n in (128, 1024, 4096))):
        print(measure(rows, queries, context, args), flush=True)


if __name__ == "__main__":
    main()
