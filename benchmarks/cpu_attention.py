"""Paged attention on the CPU against torch's SDPA on contiguous tensors: python benchmarks/cpu_attention.py.

SDPA is given what a paged cache never has: the keys and values of each layer contiguous and of one length, and (for
decode) heads grouped without a copy. Figures are the best of several calls. Bandwidth counts keys and values as read
once; arithmetic counts two operations per multiply-add, of the causal half.
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
    """Seconds of the fastest call. Calls take the layers in turn, so that none finds its data in the CPU's caches.

    A single thread is timed by the CPU time it used, which other processes on the machine disturb less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best, calls = float("inf"), 0
    end = time.perf_counter() + budget_s
    while calls < 3 or time.perf_counter() < end:
        start = clock()
        run(calls % num_layers)
        best = min(best, clock() - start)
        calls += 1
    return best


def measure(rows: int, queries: int, context: int, args: argparse.Namespace) -> str:
    H, K, D = args.heads, args.kv_heads, args.head_size
    dtype = getattr(torch, args.dtype)
    num_blocks = -(-context // BLOCK_SIZE)
    # So many layers that together they exceed the CPU's caches, as in a model.
    layer_bytes = rows * num_blocks * BLOCK_SIZE * 2 * K * D * dtype.itemsize
    num_layers = max(1, min(30, args.working_set_mb * 2**20 // layer_bytes))
    table = torch.randperm(rows * num_blocks).int().view(rows, num_blocks)
    query_starts = torch.arange(rows + 1).int() * queries
    context_lens = torch.full((rows,), context).int()
    tables = AttentionTables(query_starts, context_lens, table, BLOCK_SIZE, queries)
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
    decodes = [(rows, 1, context) for rows in (1, 64) for context in (128, 200, 512, 1024, 4096)]
    prefills = [(1, length, length) for length in (128, 1024, 4096)]
    for rows, queries, context in (*decodes, *prefills):
        print(measure(rows, queries, context, args), flush=True)


if __name__ == "__main__":
    main()
