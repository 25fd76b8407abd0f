"""Checks and times products with packed weights: `python benchmarks/gpu_packed.py [--kinds …] [--rows …] [--shape …]`.

With PYTHONPATH=src. Every case is compared with its twin first. Then each way of computing it is timed in CUDA graphs:
the kernel for one row, that of few rows on Hopper (float8 only), tiles, and the library (with unpacking, where it has
no product of such codes). Shapes are the four linear layers of Qwen3-8B, added up, or the experts of a mixture. The
floor is the time to read the weights once, or to do all multiplications. `--sweep` tries other tiles.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from graph_time import graph_us
from torch import Tensor

from quire.ops.linear import rows_hopper
from quire.ops.moe import triton as moe
from quire.ops.packed_linear import many_rows, rows, tiles, words
from quire.ops.packed_linear import triton as one_row
from quire.ops.packed_linear.forms import Affine, Float8, Form, Table4, TwoLevel
from quire.ops.rounding.reference import FLOAT8
from quire.ops.routing.reference import Routing
from quire.ops.routing.triton import route
from quire.quant.kept.triton import fits_few_rows, float8_options

BYTES_PER_S, FLOPS_PER_S, FLOPS8_PER_S = 4.3e12, 780e12, 1400e12  # the most measured on an H200
CYCLE_BYTES = 256 << 20  # of weights that take turns, so that the cache does not help
COMPILERS = 14  # processes
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
# experts, hidden size, width of an expert, experts of a token, activation
MIXTURES = {"a3b": (128, 2048, 768, 8, "silu"), "oss": (32, 2880, 2880, 4, "clamped_swiglu")}
# Other cuts, for --sweep: tiles and how often inputs are divided; of one row its constants.
TILES = [
    tiles.Tile(*sizes)
    for sizes in itertools.product((16, 32, 64, 128), (64, 128), (4, 8), (3, 4), (1, 2))
    if sizes[1] == 16 * sizes[2]
]
SPLITS = (1, 2, 4, 8)
ONE_ROW = [
    {"LANES": lanes, "CODE_LANES": lanes, "ROW_LANES": of_row}
    for lanes, of_row in itertools.product((4, 8, 12, 16), (2, 4, 8))
]


def codes(n: int, k: int, bits: int) -> Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device="cuda")


def scales(n: int, groups: int) -> Tensor:
    return (torch.rand(n, groups, device="cuda") * 0.01 + 0.005).half()


def awq(n: int, k: int) -> Form:
    found = scales(n, k // 128)
    return Affine(codes(n, k, 4), found, 4, 0, TwoLevel(codes(n, k // 128, 4), -found))


def q4_k(n: int, k: int) -> Form:
    of_groups = (TwoLevel(codes(n, k // 32, 6), scales(n, k // 256) * sign) for sign in (0.03, -0.2))
    return Affine(codes(n, k, 4), next(of_groups), 4, 0, next(of_groups))


def q6_k(n: int, k: int) -> Form:
    whole = codes(n, k // 16, 7).view(torch.int8)
    return Affine(codes(n, k, 6), TwoLevel(whole, scales(n, k // 256) * 0.01), 6, 32)


def float8(n: int, k: int, rounds: str | None = "float8 token") -> Form:
    values = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 30
    return Float8(values.to(FLOAT8), scales(n, 1).float().flatten(), rounds=rounds)


def block(n: int, k: int) -> Form:
    found = scales(-(-n // 128), -(-k // 128)).float()
    return Float8(float8(n, k).codes_NK, found, (128, 128), "float8 group")


FORMS: dict[str, Callable[[int, int], Form]] = {
    "awq": awq,
    "q4_k": q4_k,
    "q6_k": q6_k,
    "mxfp4": lambda n, k: Table4(codes(n, k, 4), codes(n, k // 32, 2) + 118),
    "fp8": float8,
    "w8a16": lambda n, k: float8(n, k, None),
    "block": block,
    "int8": lambda n, k: Affine(codes(n, k, 8), scales(n, 1) * 0.1, 8, 128, rounds="int8 token"),
}


def weight(kind: str, n: int, k: int) -> words.WordWeight:
    packed = words.pack(FORMS[kind](n, k))
    if packed is None:
        raise ValueError(f"{kind} has no packed form with {k} inputs")
    return packed


def num_bytes(w: words.WordWeight) -> int:
    return sum(tensor.nbytes for tensor in w.tensors())


# ---- linear layers ---------------------------------------------------------------------------------------------------


def by_one_row(x: Tensor, w: words.WordWeight, constants: dict[str, Any] = {}) -> Tensor:
    before = {name: getattr(one_row, name) for name in constants}
    vars(one_row).update(constants)
    try:
        inputs, found = rows.round_inputs(x, w)
        return one_row.linear(inputs, w, scales=found, dtype=x.dtype)
    finally:
        vars(one_row).update(before)


def by_tiles(x: Tensor, w: words.WordWeight, tile: tiles.Tile | None = None, splits: int = 1) -> Tensor:
    inputs, found = rows.round_inputs(x, w)
    return tiles.linear(inputs, w, scales=found, dtype=x.dtype, tile=tile, splits=splits)


def by_library(x: Tensor, w: words.WordWeight) -> Tensor:
    inputs, found = rows.round_inputs(x, w)
    return many_rows.linear(inputs, w, scales=found, dtype=x.dtype)


def by_few_rows(x: Tensor, w: words.WordWeight) -> Tensor:
    inputs, found = rows.round_inputs(x, w)
    if found is None or not fits_few_rows(inputs, w):
        raise ValueError("not a product of few rows")
    return rows_hopper.linear(inputs, w.codes, **float8_options(w, found, x.dtype))


def ways(kind: str, num_rows: int, sweep: bool) -> dict[str, Callable[[Tensor, words.WordWeight], Tensor]]:
    found: dict[str, Callable] = {"library": by_library, "tiles": by_tiles}
    if kind in ("fp8", "block") and num_rows <= rows_hopper.MAX_FLOAT8_ROWS:
        found["few rows"] = by_few_rows
    if num_rows == 1:
        found["one row"] = by_one_row
        for constants in ONE_ROW if sweep else ():
            found[str(tuple(constants.values()))] = partial(by_one_row, constants=constants)
    elif sweep:
        for tile, splits in itertools.product(TILES, SPLITS):
            if num_rows <= 2 * tile.block_m <= max(32, 2 * num_rows):
                found[f"{tuple(tile)} / {splits}"] = partial(by_tiles, tile=tile, splits=splits)
    return found


def compile_linear(kind: str, layer: str, num_rows: int, sweep: bool) -> None:
    """In a process of its own: one launch leaves the compiled kernel in Triton's cache on disk."""
    n, k = LAYERS[layer]
    w = weight(kind, n, k)
    x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
    expected = words.linear(x, w).float()
    for name, way in ways(kind, num_rows, sweep).items():
        try:
            error = (way(x, w).float() - expected).abs().max() / expected.square().mean().sqrt()
        except Exception as problem:
            print(f"{kind} {layer} {num_rows} rows, {name}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            continue
        if not error < 0.1:
            print(f"WRONG: {kind} {layer} {num_rows} rows, {name}: off by {error:.3f}", flush=True)


def time_linear(kind: str, all_rows: list[int], sweep: bool) -> None:
    times: dict[int, dict[str, list[float]]] = {num_rows: {} for num_rows in all_rows}
    floors = dict.fromkeys(all_rows, 0.0)
    for n, k in LAYERS.values():
        w = weight(kind, n, k)
        turns = [w] + [weight(kind, n, k) for _ in range(CYCLE_BYTES // num_bytes(w) + 2)]
        rate = FLOPS8_PER_S if w.rounds else FLOPS_PER_S
        for num_rows in all_rows:
            x = torch.randn(num_rows, k, device="cuda", dtype=torch.bfloat16)
            floors[num_rows] += max(num_bytes(w) / BYTES_PER_S, 2 * num_rows * n * k / rate) * 1e6
            for name, way in ways(kind, num_rows, sweep).items():
                try:
                    us = graph_us(lambda given, x=x, way=way: way(x, given), turns)
                except Exception:
                    continue
                times[num_rows].setdefault(name, []).append(us)
    for num_rows in all_rows:
        found = {name: parts for name, parts in times[num_rows].items() if len(parts) == len(LAYERS)}
        line = f"{kind:>6} {num_rows:>4} floor {floors[num_rows]:6.1f}"
        for name in sorted(found, key=lambda name: sum(found[name]))[: 6 if sweep else None]:
            parts = " ".join(f"{us:.1f}" for us in found[name])
            line += f" | {name} {sum(found[name]):.1f} ({parts})"
        print(line, flush=True)
        if sweep:
            for i, layer in enumerate(LAYERS):
                best = sorted(found, key=lambda name, i=i: found[name][i])[:4]
                print(f"        {layer:>8} " + " | ".join(f"{name} {found[name][i]:.1f}" for name in best), flush=True)


# ---- experts ---------------------------------------------------------------------------------------------------------


class Mixture:
    def __init__(self, kind: str, name: str) -> None:
        E, D, F, self.top_k, activation = MIXTURES[name]
        self.num_experts, self.hidden_size = E, D
        self.matrices = tuple(words.ExpertWords(weight(kind, E * n, k), E) for n, k in ((2 * F, D), (D, F)))
        self.named = dict(activation=activation)
        if name == "oss":
            self.named["gate_up_bias_E2F"] = torch.randn(E, 2 * F, device="cuda", dtype=torch.bfloat16)
            self.named["down_bias_ED"] = torch.randn(E, D, device="cuda", dtype=torch.bfloat16)

    def inputs(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.randn(num_rows, self.num_experts, device="cuda")
        chosen, expert_ids = route(logits, Routing(self.top_k, renormalize=True))
        return torch.randn(num_rows, self.hidden_size, device="cuda", dtype=torch.bfloat16), chosen, expert_ids

    def floor_us(self, used: float, num_rows: int) -> float:
        total = sum(num_bytes(matrix.weight) for matrix in self.matrices)
        values = sum(matrix.weight.n * matrix.weight.k for matrix in self.matrices) / self.num_experts
        rate = FLOPS8_PER_S if self.matrices[0].weight.rounds else FLOPS_PER_S
        bytes_s = total * used / self.num_experts / BYTES_PER_S
        return max(bytes_s, 2 * num_rows * self.top_k * values / rate) * 1e6


def tile_cut(tile: tiles.Tile | None) -> Callable:
    """A replacement of `expert_cut`, that always chooses this tile."""
    return ORIGINAL_CUT if tile is None else lambda *_: tile


ORIGINAL_CUT = moe.expert_cut


def expert_cases(mixture: Mixture, num_rows: int, sweep: bool) -> list[tuple[int, tiles.Tile | None]]:
    """(rows of a tile, tile)"""
    mean = num_rows * mixture.top_k / mixture.num_experts
    sizes = [size for size in (16, 32, 64, 128) if size <= max(16, 4 * mean)]
    cases: list[tuple[int, tiles.Tile | None]] = [(0, None)] if num_rows <= 8 else []
    for size in sizes:
        cases.append((size, None))
        if sweep:
            cases += [(size, tile) for tile in TILES if tile.block_m == size]
    return cases


def run_experts(mixture: Mixture, inputs: tuple, num_rows: int, case: tuple[int, tiles.Tile | None]) -> Tensor:
    E, D = mixture.num_experts, mixture.hidden_size
    F = mixture.matrices[0].num_outputs // 2
    config = moe.config(num_rows, mixture.top_k, E, D, F, torch.bfloat16)
    moe.expert_cut = tile_cut(case[1])
    try:
        return moe.experts(*inputs, *mixture.matrices, **mixture.named, cut=config._replace(block_m=case[0]))
    finally:
        moe.expert_cut = ORIGINAL_CUT


def compile_experts(kind: str, name: str, num_rows: int, sweep: bool, part: int) -> None:
    mixture = Mixture(kind, name)
    inputs = mixture.inputs(num_rows)
    for case in expert_cases(mixture, num_rows, sweep)[part :: COMPILERS if sweep else 1]:
        try:
            run_experts(mixture, inputs, num_rows, case)
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{kind} {name} {num_rows} rows {case}: {type(problem).__name__} {str(problem)[:200]}", flush=True)


def time_experts(kind: str, name: str, num_rows: int, sweep: bool) -> None:
    mixture = Mixture(kind, name)
    inputs = [mixture.inputs(num_rows) for _ in range(8)]
    used = sum(len(given[2].unique()) for given in inputs) / len(inputs)
    found = {}
    for case in expert_cases(mixture, num_rows, sweep):
        try:
            found[case] = graph_us(lambda given, case=case: run_experts(mixture, given, num_rows, case), inputs)
        except Exception:
            continue
    floor_us = mixture.floor_us(used, num_rows)
    print(f"{kind:>6} {name} {num_rows:>5} rows, {used:5.1f} experts, floor {floor_us:6.1f}", end="")
    for case in sorted(found, key=found.get)[:8]:
        print(f" | {case[0]} {'' if case[1] is None else tuple(case[1])} {found[case]:.1f}", end="")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(FORMS))
    parser.add_argument("--rows", default="1,2,4,8,16,64,128,256")
    parser.add_argument("--shape", choices=("linear", *MIXTURES), default="linear")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    kinds, all_rows = args.kinds.split(","), [int(num_rows) for num_rows in args.rows.split(",")]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        if args.shape == "linear":
            cases = [(kind, layer, m, args.sweep) for m in all_rows for kind in kinds for layer in LAYERS]
            list(pool.map(compile_linear, *zip(*cases, strict=True)))
        else:
            parts = range(COMPILERS if args.sweep else 1)
            cases = [(kind, args.shape, m, args.sweep, part) for kind in kinds for m in all_rows for part in parts]
            list(pool.map(compile_experts, *zip(*cases, strict=True)))
    print("us of a layer")
    for kind in kinds:
        if args.shape == "linear":
            time_linear(kind, all_rows, args.sweep)
        else:
            for num_rows in all_rows:
                time_experts(kind, args.shape, num_rows, args.sweep)


if __name__ == "__main__":
    main()
