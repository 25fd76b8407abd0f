"""Checks and times the linear kernels of one row and of few rows: `PYTHONPATH=src python benchmarks/gpu_linear.py`.

First it compares the plain and the gated form with their float32 twins. Then, for the linear layers of published
models, it compares ways to cut the work (`Config`) with cuBLAS, and the gated activation after it, and with what a
model uses, on Hopper mostly `rows_hopper.py`. All run in CUDA graphs that cycle through several times as many weights
as the L2 cache holds.
"""

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType
from typing import NamedTuple

import torch
from graph_time import graph_us
from torch import Tensor
from torch.nn import functional

from quire.ops.elementwise.triton import silu_mul
from quire.ops.linear import reference as ref
from quire.ops.linear import triton as one_row
from quire.ops.linear import triton_rows as few_rows
from quire.quant.plain import dense_gpu

Config = one_row.Config | few_rows.Config

DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16)
CYCLE_BYTES = 320 << 20  # several times the L2 cache
COMPILERS = 14  # processes; compiling is most of the time that this script takes


class Case(NamedTuple):
    name: str
    N: int  # outputs: half of the weight's rows if gated
    K: int
    gated: bool = False
    out_dtype: torch.dtype = DTYPE

    def weight(self) -> Tensor:
        return random(self.N * (2 if self.gated else 1), self.K) * self.K**-0.5

    def ours(self, x: Tensor, weight: Tensor, cut: Config) -> Tensor:
        ops = kernels(len(x))
        if self.gated:
            return ops.linear_silu_mul(x, weight, cut=cut)
        return ops.linear(x, weight, out_dtype=self.out_dtype, cut=cut)

    def in_model(self, x: Tensor, weight: Tensor) -> Tensor:
        ops = next((ops for ops in dense_gpu.FEW_ROWS if ops.fits(x, weight)), None)
        if ops is None:
            return self.cublas(x, weight)
        return ops.linear_silu_mul(x, weight) if self.gated else ops.linear(x, weight, out_dtype=self.out_dtype)

    def cublas(self, x: Tensor, weight: Tensor) -> Tensor:
        y = functional.linear(x, weight)
        return silu_mul(y) if self.gated else y.to(self.out_dtype)

    def cuts(self, M: int) -> list[Config]:
        """The default, then others near it."""
        if M > 1:
            default = few_rows.config(self.N, self.K, self.gated)
            others = [few_rows.WIDE, few_rows.NARROW, few_rows.SHORT]
            return list(dict.fromkeys([default, *others, few_rows.Config(16, 256, 1, 2, 5)]))
        block_n, block_k, warps = default = one_row.config(self.N, self.K, DTYPE, self.gated)
        wide_k = block_k * 2 if self.K > block_k else block_k
        cuts = [
            default,
            one_row.Config(block_n * 2, block_k, warps),
            one_row.Config(max(1, block_n // 2), block_k, warps),
            one_row.Config(block_n, wide_k, warps * 2),
            one_row.Config(block_n * 2, wide_k, warps * 2),
        ]
        return list(dict.fromkeys(cuts))


def cases_of(model: str, hidden: int, qkv: int, attention: int, mlp: int, vocab: int) -> list[Case]:
    return [
        Case(f"{model} qkv", qkv, hidden),
        Case(f"{model} o", hidden, attention),
        Case(f"{model} gate_up", mlp, hidden, gated=True),
        Case(f"{model} down", hidden, mlp),
        Case(f"{model} lm_head", vocab, hidden, out_dtype=torch.float32),
    ]


CASES = [
    *cases_of("135M", 576, 960, 576, 1536, 49152),
    *cases_of("0.6B", 1024, 4096, 2048, 3072, 151936),
    *cases_of("8B", 4096, 6144, 4096, 12288, 151936),
]


def kernels(M: int) -> ModuleType:
    return one_row if M == 1 else few_rows


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def check(form: str, M: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    """In a process of its own, where new memory is filled with NaN, to show what is not written."""
    torch.empty = lambda *shape, **kw: torch.full(shape, torch.nan, **kw)
    N, K = size
    rows = N if form == "linear" else 2 * N
    args = random(M, K, dtype=dtype), random(rows, K, dtype=dtype) * K**-0.5, random(rows, dtype=dtype)
    y = getattr(kernels(M), form)(*args).float()
    expected = getattr(ref, form)(*(arg.float() for arg in args))
    worst = ((y - expected).abs() / (1 + expected.abs())).max().item()
    if not worst <= (5e-2 if dtype == torch.bfloat16 else 2e-5):
        raise ArithmeticError(f"WRONG: {form} M={M} N={N} K={K} {dtype}: off by {worst}")


def compile_cut(case: Case, M: int, cut: Config) -> None:
    """In a process of its own: one launch leaves the compiled kernel in Triton's cache on disk."""
    case.ours(random(M, case.K), case.weight(), cut)
    torch.cuda.synchronize()


def time_case(case: Case) -> list[dict]:
    weights = [case.weight()]
    num_bytes = weights[0].nbytes
    num_weights = max(4, -(-CYCLE_BYTES // num_bytes))
    weights += [case.weight() for _ in range(num_weights - 1)]
    results = []
    for M in ROWS:
        x = random(M, case.K)
        cublas = graph_us(lambda weight, x=x: case.cublas(x, weight), weights)
        cuts = case.cuts(M)
        us = {cut: graph_us(lambda weight, x=x, cut=cut: case.ours(x, weight, cut), weights) for cut in cuts}
        in_model = graph_us(lambda weight, x=x: case.in_model(x, weight), weights)
        default, best = cuts[0], min(us, key=us.get)
        results.append(
            {
                "case": case.name,
                "M": M,
                "N": case.N,
                "K": case.K,
                "cublas_us": cublas,
                "in_model_us": in_model,
                "default_us": us[default],
                "best": best._asdict(),
                "best_us": us[best],
                "all": [(tuple(cut), t) for cut, t in us.items()],
            }
        )
        rate = num_bytes / us[default] / 1e6
        figures = f"{cublas:8.2f} {in_model:8.2f} {us[default]:8.2f} {rate:6.2f} {us[best]:8.2f}"
        print(f"{case.name:>14} {M:>2}  {figures}  {tuple(best)}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where to write every figure")
    parser.add_argument("--cases", nargs="+", help="names, or beginnings of names, such as '0.6B qkv'")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.cases or case.name.startswith(tuple(args.cases))]
    sizes = ((1024, 1024), (203, 576))
    forms = ("linear", "linear_silu_mul")
    checks = [*itertools.product(forms, ROWS, sizes, [DTYPE]), *itertools.product(forms, [1], sizes, [torch.float32])]
    cuts = [(case, M, cut) for case in cases for M in ROWS for cut in case.cuts(M)]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        compiled = pool.map(compile_cut, *zip(*cuts, strict=True))
        list(pool.map(check, *zip(*checks, strict=True)))
        print("both forms equal their float32 twins")
        list(compiled)
    print("us of a call")
    print(f"{'case':>14} {'M':>2}  {'cuBLAS':>8} {'model':>8} {'default':>8} {'TB/s':>6} {'best':>8}  its cut")
    results = [result for case in cases for result in time_case(case)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
