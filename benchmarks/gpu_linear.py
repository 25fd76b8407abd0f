"""Checks and times the linear kernels of few rows: `PYTHONPATH=src python benchmarks/gpu_linear.py [--quick] [--json PATH]`.

Every form against its float32 twin first. Then, for the linears of a 0.6B and an 8B model, candidate cuts against cuBLAS, in CUDA
graphs that go round weights of several times the L2 cache. Last, a model's worth of layers with and without dependent launch.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops import linear as ops
from quire.ops.linear import Config
from quire.ops.ref import linear as ref

DTYPE, EPS = torch.bfloat16, 1e-6
FORMS = ("linear", "linear_silu_mul", "norm_linear", "norm_linear_silu_mul")
ROWS = (1, 2, 4, 8, 16, 32, 64)
CYCLE_BYTES = 320 << 20  # several times the L2 cache
FUSED_NORM_ROWS = 16  # above, a norm of its own costs little beside the product
COMPILERS = 14  # processes
REPLAYS = 7


class Case(NamedTuple):
    name: str
    form: str
    N: int  # outputs: half of the weight's rows if gated
    K: int

    @property
    def gated(self) -> bool:
        return "silu" in self.form

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.N * (2 if self.gated else 1), self.K

    @property
    def num_bytes(self) -> int:
        return self.weight_shape[0] * self.K * DTYPE.itemsize

    def rows(self, wanted: tuple[int, ...]) -> list[int]:
        """A fused norm is timed where it may pay, the plain form of the same product above."""
        plain_twin = self.name.endswith(" plain")
        return [M for M in wanted if (M > 4 if plain_twin else M <= FUSED_NORM_ROWS or "norm" not in self.form)]

    def call(self, M: int, cut: Config | None) -> Callable[[Tensor], Tensor]:
        """The product as a function of the weight."""
        x = random(M, self.K)
        if "norm" in self.form:
            residual, norm_weight = random(M, self.K), random(self.K)
            return lambda weight: getattr(ops, self.form)(x, residual, norm_weight, EPS, weight, cut=cut)[0]
        if "lm_head" in self.name:
            return lambda weight: ops.linear(x, weight, out_dtype=torch.float32, cut=cut)
        return lambda weight: getattr(ops, self.form)(x, weight, cut=cut)


def cases_of(model: str, hidden: int, qkv: int, attention: int, mlp: int, vocab: int) -> list[Case]:
    return [
        Case(f"{model} qkv", "norm_linear", qkv, hidden),
        Case(f"{model} qkv plain", "linear", qkv, hidden),
        Case(f"{model} o", "linear", hidden, attention),
        Case(f"{model} gate_up", "norm_linear_silu_mul", mlp, hidden),
        Case(f"{model} gate_up plain", "linear_silu_mul", mlp, hidden),
        Case(f"{model} down", "linear", hidden, mlp),
        Case(f"{model} lm_head", "linear", vocab, hidden),
    ]


CASES = cases_of("0.6B", 1024, 4096, 2048, 3072, 151936) + cases_of("8B", 4096, 6144, 4096, 12288, 151936)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE) * scale


def candidates(case: Case, M: int, quick: bool) -> list[Config]:
    """The default cut first."""
    N, K = case.N, case.K
    cuts = [ops.config(M, N, K, DTYPE, case.gated, "norm" in case.form)]
    if quick:
        return cuts
    if M <= ops.MAX_VECTOR_ROWS:
        base = ops._vector_config(N, K, DTYPE, case.gated, norm=True)
        cuts += [base, base._replace(tiles=1), base._replace(block_n=base.block_n * 2, tiles=max(1, base.tiles // 2))]
        if M == 1:
            cuts += [base._replace(tiles=max(1, base.tiles // 2)), base._replace(block_n=max(1, base.block_n // 2), tiles=base.tiles)]
    base = ops._dot_config(M, N, K, DTYPE, case.gated)
    cuts += [base]
    if M > 1:
        cuts += [base._replace(block_n=base.block_n * 2), base._replace(block_k=128, stages=3), base._replace(warps=8, stages=3)]
    if M >= 8:
        cuts += [base._replace(block_n=base.block_n // 2), base._replace(block_n=16, warps=2, stages=6)]
    return list(dict.fromkeys(cut for cut in cuts if cut.block_n >= (8 if cut.dot else 1)))


def compile_share(jobs: list[tuple[Case, int, Config]]) -> None:
    """In a process of its own: launches once, which leaves the compiled kernel in Triton's cache on disk."""
    for case, M, cut in jobs:
        try:
            case.call(M, cut)(torch.zeros(case.weight_shape, device="cuda", dtype=DTYPE))
        except Exception as error:  # too much shared memory, say: the timing will skip it
            print(f"{case.name} M={M} {tuple(cut)}: {error}"[:160], flush=True)
    torch.cuda.synchronize()


def compile_all(jobs: list[tuple[Case, int, Config]]) -> None:
    # Jobs that share a compiled kernel differ only in N, or in rows of one dot tile.
    def key(job: tuple[Case, int, Config]) -> tuple:
        case, M, cut = job
        return case.form, case.K, "lm_head" in case.name, cut, max(16, M) if cut.dot else M

    distinct = list({key(job): job for job in jobs}.values())
    in_processes(compile_share, distinct)


def in_processes(work: Callable[[list], None], jobs: list) -> None:
    """Compiling is most of the time that this script takes, and one process compiles one kernel at a time."""
    shares = [share for i in range(COMPILERS) if (share := jobs[i::COMPILERS])]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(work, shares))


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds per call, the median of several replays of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def time_case(case: Case, rows: tuple[int, ...], quick: bool, deadline: float) -> list[dict]:
    copies = max(4, -(-CYCLE_BYTES // case.num_bytes))
    weights = [random(*case.weight_shape, scale=case.K**-0.5) for _ in range(copies)]
    results = []
    for M in case.rows(rows):
        x = random(M, case.K)
        cublas = graph_us([lambda w=w, x=x: functional.linear(x, w) for w in weights])
        timed: dict[Config, float] = {}
        for cut in candidates(case, M, quick):
            if timed and time.monotonic() > deadline:
                break
            product = case.call(M, cut)
            try:
                timed[cut] = graph_us([lambda w=w, product=product: product(w) for w in weights])
            except Exception as error:
                print(f"{case.name} M={M} {tuple(cut)}: {error}"[:160])
        best, default = min(timed, key=timed.get), next(iter(timed))
        results.append({
            "case": case.name, "form": case.form, "M": M, "N": case.N, "K": case.K, "best": best._asdict(), "us": timed[best],
            "default_us": timed[default], "tb_per_s": case.num_bytes / timed[best] / 1e6, "cublas_us": cublas,
            "all": [(tuple(cut), us) for cut, us in timed.items()],
        })  # fmt: skip
        print_row(results[-1])
    return results


def print_row(r: dict) -> None:
    b = r["best"]
    kind = f"dot {b['block_n']}x{b['block_k']} w{b['warps']} s{b['stages']}" if b["dot"] else (
        f"vec {b['block_n']}x{b['block_k']} w{b['warps']} t{b['tiles']}"
    )  # fmt: skip
    print(
        f"{r['case']:>18} {r['M']:>3}  {kind:<20} {r['us']:8.2f} {r['tb_per_s']:6.2f} {r['default_us']:9.2f} {r['cublas_us']:9.2f}",
        flush=True,
    )


def check() -> None:
    """Every form against the twin in float32, in bf16 and (few rows only) float32."""
    sizes = (1024, 1024), (200, 576)
    jobs = list(itertools.product(FORMS, (1, 2, 3, 8, 16, 33, 64), sizes, (torch.bfloat16,)))
    jobs += itertools.product(FORMS, (1, 3, 16), sizes, (torch.float32,))
    in_processes(check_share, jobs)
    print("all forms equal their float32 twin")


def check_share(jobs: list[tuple]) -> None:
    """In a process of its own, where every output is poisoned first."""
    torch.empty = lambda *shape, **kw: torch.full(shape, torch.nan, **kw)
    torch.empty_like = lambda x: torch.full_like(x, torch.nan)
    for form, M, (N, K), dtype in jobs:
        check_one(form, M, N, K, dtype)


def check_one(form: str, M: int, N: int, K: int, dtype: torch.dtype) -> None:
    rows = 2 * N if "silu" in form else N
    norm = [random(M, K), 1 + random(K, scale=0.1), EPS] if "norm" in form else []
    args = [random(M, K), *norm, random(rows, K, scale=K**-0.5), random(rows)]
    args = [a.to(dtype) if isinstance(a, Tensor) else a for a in args]
    wide = [a.float() if isinstance(a, Tensor) else a for a in args]
    cuts = [ops._dot_config(M, N, K, dtype, "silu" in form)]
    if M <= ops.MAX_VECTOR_ROWS:
        vector = ops._vector_config(N, K, dtype, "silu" in form, bool(norm))
        cuts += [vector, vector._replace(tiles=3)] if M == 1 else [vector]
    expected = getattr(ref, form)(*wide)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 2e-5
    for cut in cuts:
        found = getattr(ops, form)(*args, cut=cut)
        pairs = zip(found, expected, strict=True) if norm else [(found, expected)]
        for y, y_wide in pairs:
            worst = ((y.float() - y_wide).abs() / (1 + y_wide.abs())).max().item()
            if not worst <= tolerance:
                raise ArithmeticError(f"WRONG: {form} M={M} N={N} K={K} {dtype} {tuple(cut)}: off by {worst}")


def time_chain(num_layers: int = 28, hidden: int = 1024, qkv: int = 4096, attention: int = 2048, mlp: int = 3072) -> dict[str, float]:
    """One row through a model's linears (the first inputs of o stand for attention), in ms."""
    sizes = (qkv, hidden), (hidden, attention), (2 * mlp, hidden), (hidden, mlp)
    layers = [[random(*size, scale=size[1] ** -0.5) for size in sizes] for _ in range(num_layers)]
    norm_weight, x0, residual0 = random(hidden), random(1, hidden), random(1, hidden)

    def ours() -> None:
        x, residual = x0, residual0
        for w_qkv, w_o, w_gate_up, w_down in layers:
            heads, residual = ops.norm_linear(x, residual, norm_weight, EPS, w_qkv)
            x = ops.linear(heads[:, :attention], w_o)
            gated, residual = ops.norm_linear_silu_mul(x, residual, norm_weight, EPS, w_gate_up)
            x = ops.linear(gated, w_down)

    def cublas() -> None:
        for w_qkv, w_o, w_gate_up, w_down in layers:
            heads = functional.linear(x0, w_qkv)
            x = functional.linear(heads[:, :attention], w_o)
            functional.linear(functional.linear(x, w_gate_up)[:, :mlp], w_down)

    dependent = ops.pdl
    times = {"pdl_ms": graph_us([ours]) / 1e3, "cublas_products_only_ms": graph_us([cublas]) / 1e3}
    ops.pdl = lambda x: False
    times["no_pdl_ms"] = graph_us([ours]) / 1e3
    ops.pdl = dependent
    times["floor_ms"] = sum(w.nbytes for layer in layers for w in layer) / 4.3e12 * 1e3
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the default cuts only, at 1 and 16 rows")
    parser.add_argument("--json", help="where to write every figure")
    parser.add_argument("--cases", nargs="+", help="names, or beginnings of names, such as '0.6B qkv'")
    parser.add_argument("--budget-s", type=float, default=85, help="from then on default cuts only")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget_s
    rows = (1, 16) if args.quick else ROWS
    cases = [c for c in CASES if not args.cases or c.name.startswith(tuple(args.cases))]
    check()
    compile_all([(case, M, cut) for case in cases for M in case.rows(rows) for cut in candidates(case, M, args.quick)])
    print(f"compiled, {deadline - time.monotonic():.0f} s left")
    chain = time_chain()
    print("28 layers, one row: " + ", ".join(f"{name} {ms:.3f}" for name, ms in chain.items()))
    print(f"{'case':>18} {'M':>3}  {'best cut':<20} {'us':>8} {'TB/s':>6} {'default':>9} {'cuBLAS':>9}")
    results = [r for case in cases for r in time_case(case, rows, args.quick, deadline)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"chain": chain, "cases": results}, file, indent=1)


if __name__ == "__main__":
    main()
