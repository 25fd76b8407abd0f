"""Microbenchmark of the packed linear kernels: `python benchmarks/cpu_linear.py [--rows 1 64] [--bits 4 8 16]`.

Compares them, for the shapes of a 135M Llama, with torch's bf16 product and torch's packed int4 product. Every call
uses another copy of the weight, 96 MB of them in turn, as in a model with many layers; a single copy would stay in the
second-level cache.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from quire.ops.packed_linear import cpu

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
GGUF_TYPES = {4: "Q4_1", 8: "Q8_0"}
CYCLE_BYTES = 96 << 20
CALLS_PER_SAMPLE = 8


def num_copies(nbytes: int) -> int:
    """How many weights of so many bytes a case cycles through."""
    return max(1, CYCLE_BYTES // nbytes)


def random_gguf(type_name: str, n: int, k: int) -> torch.Tensor:
    """Random Q4_1 or Q8_0 blocks with scales (and mins) of about 0.01."""
    header_bytes, block_bytes = {"Q4_1": (4, 20), "Q8_0": (2, 34)}[type_name]
    blocks = torch.randint(0, 256, (n * k // 32, block_bytes), dtype=torch.uint8)
    header = (torch.randn(len(blocks), header_bytes // 2) * 0.01).half()
    blocks[:, :header_bytes] = header.view(torch.uint8)
    return blocks.flatten()


def packed_case(bits: int, n: int, k: int, copies: int) -> tuple[list, Callable, int]:
    if bits == 16:
        weights = [cpu.concat([cpu.pack_dense(torch.randn(n, k) * 0.05)]) for _ in range(copies)]
    else:
        raw = random_gguf(GGUF_TYPES[bits], n, k)
        weights = [cpu.concat([cpu.pack_gguf(GGUF_TYPES[bits], raw, n, k)]) for _ in range(copies)]
    return weights, cpu.linear, weights[0].nbytes


def torch_bf16_case(n: int, k: int, copies: int) -> tuple[list, Callable, int]:
    return [torch.randn(n, k).bfloat16() for _ in range(copies)], F.linear, n * k * 2


def torch_int4_case(n: int, k: int, copies: int) -> tuple[list, Callable, int]:
    q = torch.randint(0, 16, (n, k), dtype=torch.int32)
    scales = torch.randn(k // 32, n, 2).bfloat16()
    weights = [(torch._convert_weight_to_int4pack_for_cpu(q, 2), scales.clone()) for _ in range(copies)]

    def product(x: torch.Tensor, w: tuple) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, w[0], 32, w[1])

    return weights, product, n * k // 2 + scales.nbytes


def seconds_per_call(weights: list, product: Callable, x: torch.Tensor, budget_s: float) -> float:
    """The best of many samples, each of so few calls that some are not interrupted even on a busy machine."""
    best, idx = float("inf"), 0
    deadline = time.perf_counter() + budget_s
    num_calls = min(CALLS_PER_SAMPLE, len(weights))
    while time.perf_counter() < deadline or best == float("inf"):
        sample = [weights[(idx + i) % len(weights)] for i in range(num_calls)]
        idx += num_calls
        start = time.perf_counter()
        for w in sample:
            product(x, w)
        best = min(best, (time.perf_counter() - start) / num_calls)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--bits", type=int, nargs="*", default=(4, 8, 16))
    parser.add_argument("--budget-s", type=float, default=0.3, help="seconds spent per figure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's own products")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"compiled kernels: {cpu.supported()}, threads: {torch.get_num_threads()}; µs (GB/s of weights, GFLOP/s)")
    for shape in args.shapes:
        n, k = SHAPES[shape]
        cases = {f"quire {bits}-bit": packed_case(bits, n, k, num_copies(n * k * bits // 8)) for bits in args.bits}
        if not args.no_torch:
            cases["torch bf16"] = torch_bf16_case(n, k, num_copies(n * k * 2))
            cases["torch int4"] = torch_int4_case(n, k, num_copies(n * k // 2))
        print(f"\n{shape} {n}x{k}" + "".join(f"{name:>28}" for name in cases))
        for rows in args.rows:
            x = torch.randn(rows, k).bfloat16()
            line = f"{rows:>6} rows    "
            for weights, product, nbytes in cases.values():
                seconds = seconds_per_call(weights, product, x, args.budget_s)
                bandwidth, flops = nbytes / seconds, 2 * rows * n * k / seconds
                line += f"{seconds * 1e6:>10.0f} ({bandwidth / 1e9:5.1f}, {flops / 1e9:7.0f})"
            print(line, flush=True)


if __name__ == "__main__":
    main()
