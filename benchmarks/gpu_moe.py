"""Checks and times mixtures of experts: `python benchmarks/gpu_moe.py [--shapes …] [--tokens …] [--tune]`.

With PYTHONPATH=src. First it compares every case with its bfloat16 twin. Then it times routing and experts in CUDA
graphs, in microseconds, and prints their floor: the time to read the weights of all experts in use once, or to do all
multiplications, whichever is longer. `--tune` tries other ways to cut the work, each product by itself.
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
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 780e12  # the most measured on an H200
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
CALLS = 8  # of a graph, each with its own tokens and experts, so that the cache does not help
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


DEEPSEEK_ROUTING = Routing(8, "sigmoid", True, 2.5, num_groups=8, num_groups_kept=4, group_score_size=2)
SHAPES = (
    Shape("30B-A3B", 128, 2048, 768, Routing(8, renormalize=True)),
    Shape("8x7B", 8, 4096, 14336, Routing(2, renormalize=True)),
    Shape("lite", 64, 2048, 1408, Routing(6)),
    Shape("671B", 256, 7168, 2048, DEEPSEEK_ROUTING),
    Shape("20b", 32, 2880, 2880, Routing(4, renormalize=True), "clamped_swiglu", bias=True),
)


class Layer:
    """The weights of a mixture of random experts, and calls of it."""

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
        logits = router_logits(x, self.router)
        expected = twin_routing.router_logits(x, self.router)
        if not torch.allclose(logits.sum(0), expected[0], rtol=1e-3, atol=1e-3):
            raise ArithmeticError("a router's logits are not its twin's")
        found, wanted = (f(logits, self.shape.routing) for f in (route, twin_routing.route))
        same = (found[1] == wanted[1]).all(1)  # scores of groups that differ only by rounding may change the order
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
    """Cuts that differ from this one in one field, by the field's name."""
    found = {}
    for name, num_matrices in (("gate_up", 2), ("down", 1)):
        if cut.block_m:
            tiles = [tile for tile in MANY_TILES if _fits(tile, cut.block_m, num_matrices)]
        else:
            tiles = FEW_TILES
        found[name] = [cut._replace(**{name: tile}) for tile in tiles]
    if cut.block_m:
        sizes = (cut.block_m // 2, cut.block_m * 2)
        found["block_m"] = [cut._replace(block_m=size) for size in sizes if size >= 16]
    return found


def _fits(tile: Tile, block_m: int, num_matrices: int) -> bool:
    """Whether shared memory and registers suffice, and the left operand has 16 rows for each warp.

    A left operand of fewer than 64 tokens needs no such number: its products use the older instructions.
    """
    shared_bytes = tile.num_stages * tile.block_k * (block_m + num_matrices * tile.block_n) * DTYPE.itemsize
    registers = block_m * tile.block_n * num_matrices // (tile.num_warps * 32)
    if tile.swap:
        has_rows = tile.block_n >= 16 * tile.num_warps and block_m < 128
    else:
        has_rows = block_m < 64 or block_m >= 16 * tile.num_warps
    return shared_bytes <= MAX_SHARED_BYTES and registers <= 160 and has_rows


def compile_cut(shape: Shape, cut: Config) -> str | None:
    """In a process of its own: one launch leaves the kernels in Triton's cache on disk. Returns the error, if any."""
    try:
        layer = Layer(shape._replace(num_experts=8, routing=Routing(shape.routing.num_experts_per_token)))
        layer.ours(layer.inputs(4), cut)
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler says about this cut, others may compile
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.100}"
    return None


def tune(layer: Layer, num_tokens: int, failed: dict, default_us: float) -> None:
    shape = layer.shape
    inputs = [layer.inputs(num_tokens) for _ in range(CALLS)]
    for name, cuts in others(shape.cut(num_tokens)).items():
        us = {}
        for cut in cuts:
            if not failed.get((shape, cut)):
                try:
                    us[cut] = graph_us(lambda given, cut=cut: layer.ours(given, cut), inputs)
                except Exception as error:
                    print(f"    {cut}: {error}")
        for cut in sorted(us, key=us.get)[:3]:
            value = cut.block_m if name == "block_m" else tuple(getattr(cut, name))
            print(f"    {name:>8} {us[cut]:9.1f} us ({us[cut] - default_us:+.1f})  {value}", flush=True)


def time_case(layer: Layer, num_tokens: int) -> dict:
    shape = layer.shape
    inputs = [layer.inputs(num_tokens) for _ in range(CALLS)]
    us = graph_us(layer.ours, inputs)
    routing_us = graph_us(lambda given: route(router_logits(given[0], layer.router), shape.routing), inputs)
    used = statistics.mean(len(ids.unique()) for _, _, ids in inputs)
    num_bytes = used * shape.expert_bytes + 2 * inputs[0][0].nbytes
    flops = inputs[0][2].numel() * shape.expert_bytes  # two per parameter of two bytes
    floor_us = max(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6
    times = f"{routing_us:8.1f} {us:9.1f} {floor_us:9.1f}"
    rates = f"{num_bytes / us / 1e6:6.2f} {flops / us / 1e6:7.1f} {floor_us / us:6.0%}"
    block_m = shape.cut(num_tokens).block_m
    print(f"{shape.name:>8} {num_tokens:>5} {used:>6.1f} {times} {rates}  block_m {block_m}", flush=True)
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
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--tune", action="store_true", help="try other cuts of every case: name few shapes and tokens")
    parser.add_argument("--json", help="where to write the figures")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.name in args.shapes]
    cuts = {(shape, shape.cut(num_tokens)): None for shape in shapes for num_tokens in args.tokens}
    if args.tune:
        for shape, default in list(cuts):
            for alternatives in others(default).values():
                cuts |= {(shape, cut): None for cut in alternatives}
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        failed = dict(zip(cuts, pool.map(compile_cut, *zip(*cuts, strict=True)), strict=True))
    for (shape, cut), error in failed.items():
        if error:
            print(f"cannot be compiled: {shape.name} {cut}: {error}")
    print("us of routing and of all experts; TB/s, TFLOP/s, and the share of the floor that the experts reach")
    print("   shape  rows   used  routing   experts     floor   TB/s TFLOP/s  share")
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
