"""Checks and times mixtures of experts: `PYTHONPATH=src python benchmarks/gpu_moe.py [--shapes S …] [--tokens T …] [--tune]`.

Every case against its bfloat16 twin first; then microseconds of routing and of the experts in CUDA graphs, beside the floor: the weights
of all experts that are used read once, or all products made, whichever takes longer. `--tune` tries other cuts, each product by itself.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from graph_time import graph_us
from torch import Tensor

from quire.ops.moe import reference as twin
from quire.ops.moe import triton as moe
from quire.ops.moe.triton import Config, Tile
from quire.ops.routing import reference as twin_routing
from quire.ops.routing.reference import Routing
from quire.ops.routing.triton import route, router_logits

DTYPE = torch.bfloat16
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 780e12  # what an H200 does at best, measured
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
CALLS = 8  # of a graph, each with tokens and experts of its own: the cache does not help
COMPILERS = 14  # processes
MAX_SHARED_BYTES = 224 << 10


class Shape(NamedTuple):
    name: str
    num_experts: int
    hidden_size: int
    expert_size: int
    routing: Routing
    activation: str = "silu"
    bias: bool = False

    def cut(self, num_tokens: int) -> Config:
        top_k = self.routing.num_experts_per_token
        return moe.config(num_tokens, top_k, self.num_experts, self.hidden_size, self.expert_size, DTYPE)

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden_size * self.expert_size * DTYPE.itemsize


SHAPES = (
    Shape("30B-A3B", 128, 2048, 768, Routing(8, renormalize=True)),
    Shape("8x7B", 8, 4096, 14336, Routing(2, renormalize=True)),
    Shape("lite", 64, 2048, 1408, Routing(6)),
    Shape(
        "671B", 256, 7168, 2048, Routing(8, "sigmoid", True, 2.5, num_groups=8, num_groups_kept=4, group_score_size=2)
    ),
    Shape("20b", 32, 2880, 2880, Routing(4, renormalize=True), "clamped_swiglu", bias=True),
)


class Layer:
    """A mixture's numbers, and calls of it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        E, D, F = shape.num_experts, shape.hidden_size, shape.expert_size
        self.router = random(E, D).mul_(D**-0.5)
        self.matrices = random(E, 2 * F, D).mul_(D**-0.5), random(E, D, F).mul_(F**-0.5)
        biases = (random(E, 2 * F), random(E, D)) if shape.bias else (None, None)
        self.named = dict(activation=shape.activation, gate_up_bias_E2F=biases[0], down_bias_ED=biases[1])

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = route(random(num_tokens, self.shape.num_experts), self.shape.routing)
        return random(num_tokens, self.shape.hidden_size), weights, ids

    def ours(self, inputs: tuple[Tensor, ...], cut: Config | None = None) -> Tensor:
        return moe.experts(*inputs, *self.matrices, **self.named, cut=cut)

    def check(self, num_tokens: int) -> None:
        x = random(num_tokens, self.shape.hidden_size)
        logits, expected = router_logits(x, self.router), twin_routing.router_logits(x, self.router)
        if not torch.allclose(logits.sum(0), expected[0], rtol=1e-3, atol=1e-3):
            raise ArithmeticError("a router's logits are not its twin's")
        found, wanted = (f(logits, self.shape.routing) for f in (route, twin_routing.route))
        same = (found[1] == wanted[1]).all(1)  # sums of groups may tie but for rounding
        if same.float().mean() < 0.999 or not torch.allclose(found[0][same], wanted[0][same], rtol=1e-4, atol=1e-6):
            raise ArithmeticError("routing is not its twin")
        inputs = self.inputs(num_tokens)
        expected = twin.experts(*inputs, *self.matrices, **self.named).float()
        error = (self.ours(inputs).float() - expected).abs() / expected.square().mean().sqrt()
        if not (error.mean() <= 0.01 and error.max() <= 0.15):
            raise ArithmeticError(f"off by {error.mean():.4f} on average, {error.max():.3f} at most")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


# ---- other cuts ----

FEW_TILES = [
    Tile(n, k, w) for n, k, w in itertools.product((1, 2, 4, 8), (256, 512, 1024, 2048), (2, 4, 8)) if n * k == w * 256
]
MANY_TILES = [
    Tile(*sizes, bulk=True) for sizes in itertools.product((64, 128, 256), (64, 128), (4, 8), (3, 4, 5), (False, True))
]


def others(cut: Config) -> dict[str, list[Config]]:
    """Cuts that differ from this one in one thing, by that thing."""
    if not cut.block_m:
        return {name: [cut._replace(**{name: tile}) for tile in FEW_TILES] for name in ("gate_up", "down")}
    found = {
        name: [cut._replace(**{name: t}) for t in MANY_TILES if _fits(t, cut.block_m, times)]
        for name, times in (("gate_up", 2), ("down", 1))
    }
    return found | {"block_m": [cut._replace(block_m=m) for m in (cut.block_m // 2, cut.block_m * 2) if m >= 16]}


def _fits(tile: Tile, block_m: int, times: int) -> bool:
    """Shared memory, registers, and on the left side 16 rows for each warp, or all for all: few tokens, the older instructions."""
    shared_bytes = tile.num_stages * tile.block_k * (block_m + times * tile.block_n) * DTYPE.itemsize
    registers = block_m * tile.block_n * times // (tile.num_warps * 32)
    fills = (
        tile.block_n >= 16 * tile.num_warps and block_m < 128
        if tile.swap
        else block_m < 64 or block_m >= 16 * tile.num_warps
    )
    return shared_bytes <= MAX_SHARED_BYTES and registers <= 160 and fills


def compile_cut(shape: Shape, cut: Config) -> str | None:
    """In a process of its own: one launch leaves the kernels in Triton's cache on disk. Returns what went wrong."""
    try:
        layer = Layer(shape._replace(num_experts=8, routing=Routing(shape.routing.num_experts_per_token)))
        layer.ours(layer.inputs(4), cut)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler has to say about a cut: others may do
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.100}"


def tune(layer: Layer, num_tokens: int, failed: dict, default_us: float) -> None:
    shape, inputs = layer.shape, [layer.inputs(num_tokens) for _ in range(CALLS)]
    for name, cuts in others(shape.cut(num_tokens)).items():
        us = {}
        for cut in cuts:
            if not failed.get((shape, cut)):
                try:
                    us[cut] = graph_us(lambda given, cut=cut: layer.ours(given, cut), inputs)
                except Exception as error:
                    print(f"    {cut}: {error}")
        for cut in sorted(us, key=us.get)[:3]:
            value = getattr(cut, name)
            print(
                f"    {name:>8} {us[cut]:9.1f} us ({us[cut] - default_us:+.1f})  {tuple(value) if name != 'block_m' else value}",
                flush=True,
            )


def time_case(layer: Layer, num_tokens: int) -> dict:
    shape = layer.shape
    inputs = [layer.inputs(num_tokens) for _ in range(CALLS)]
    us = graph_us(layer.ours, inputs)
    routing_us = graph_us(lambda given: route(router_logits(given[0], layer.router), shape.routing), inputs)
    used = statistics.mean(len(ids.unique()) for _, _, ids in inputs)
    num_bytes = used * shape.expert_bytes + 2 * inputs[0][0].nbytes
    flops = inputs[0][2].numel() * shape.expert_bytes  # two per parameter of two bytes
    floor_us = max(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6
    rates = f"{num_bytes / us / 1e6:6.2f} {flops / us / 1e6:7.1f}"
    print(
        f"{shape.name:>8} {num_tokens:>5} {used:>6.1f} {routing_us:8.1f} {us:9.1f} {floor_us:9.1f} {rates} {floor_us / us:6.0%}  block_m {shape.cut(num_tokens).block_m}",
        flush=True,
    )
    return {
        "shape": shape.name,
        "tokens": num_tokens,
        "experts_used": used,
        "routing_us": routing_us,
        "us": us,
        "floor_us": floor_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[s.name for s in SHAPES], default=[s.name for s in SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--tune", action="store_true", help="try other cuts of every case: name few shapes and tokens")
    parser.add_argument("--json", help="where to write the figures")
    args = parser.parse_args()
    shapes = [s for s in SHAPES if s.name in args.shapes]
    cuts = {(s, s.cut(T)): None for s in shapes for T in args.tokens}
    if args.tune:
        cuts |= {(s, cut): None for s, default in list(cuts) for kind in others(default).values() for cut in kind}
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        failed = dict(zip(cuts, pool.map(compile_cut, *zip(*cuts, strict=True)), strict=True))
    for (shape, cut), error in failed.items():
        if error:
            print(f"cannot be compiled: {shape.name} {cut}: {error}")
    print("us of routing and of all experts; TB/s, TFLOP/s, and the share of the floor that the experts reach")
    print(
        f"{'shape':>8} {'rows':>5} {'used':>6} {'routing':>8} {'experts':>9} {'floor':>9} {'TB/s':>6} {'TFLOP/s':>7} {'share':>6}"
    )
    results = []
    for shape in shapes:
        layer = Layer(shape)
        for num_tokens in args.tokens:
            try:
                layer.check(num_tokens)
                results.append(time_case(layer, num_tokens))
            except Exception as error:
                print(f"{shape.name:>8} {num_tokens:>5} FAILED: {error}", flush=True)
                continue
            if args.tune:
                tune(layer, num_tokens, failed, results[-1]["us"])
        del layer
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
