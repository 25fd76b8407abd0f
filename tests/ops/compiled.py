"""Compiles kernels for a card that is not there: `TRITON_INTERPRET=0 python -m tests.ops.compiled 9.0 experts`.

Prints a line of JSON for each kernel. Wrappers of `quire.ops` are called as in a step, with tensors of real models'
sizes that are never filled. Instead of launching, Triton compiles for a card of that compute capability. So errors show
that its interpreter does not find, in types and in the use of shared memory.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.ops import launch
from quire.ops.attention import triton as attention
from quire.ops.attention import triton_codes
from quire.ops.attention.reference import AttentionTables
from quire.ops.elementwise.triton_rope import rope_and_write
from quire.ops.linear import rows_hopper
from quire.ops.mla import triton as mla
from quire.ops.moe import triton as moe
from quire.ops.moe import triton_sort
from quire.ops.packed_linear import cuts, many_rows, rows, tiles, tiles_hopper, words
from quire.ops.packed_linear import triton as few
from quire.ops.packed_linear.cuts import Rows, Tile
from quire.ops.packed_linear.forms import Affine, Float8, Table4, TwoLevel
from quire.ops.rounding.reference import FLOAT8
from quire.ops.routing import triton as routing
from quire.ops.routing.reference import Routing

NUM_MULTIPROCESSORS = 132
# Experts of a token, experts, hidden size, width of an expert, activation, bias.
EXPERTS = {
    "30B-A3B": (8, 128, 2048, 768, "silu", False),
    "20b": (4, 32, 2880, 2880, "clamped_swiglu", True),
}
# Experts, hidden size, rule.
ROUTERS = {
    "30B-A3B": (128, 2048, Routing(8, renormalize=True)),
    "671B": (256, 7168, Routing(8, "sigmoid", True, 2.5, num_groups=8, num_groups_kept=4, group_score_size=2)),
}


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def experts() -> None:
    for name, (K, E, D, F, activation, bias) in EXPERTS.items():
        biases = (bf16(E, 2 * F), bf16(E, D)) if bias else (None, None)
        token_counts = (1, 64, 256, 512, 8192) if name == "30B-A3B" else (64, 8192)
        for T in token_counts:
            moe.experts(
                bf16(T, D),
                torch.empty(T, K),
                torch.empty(T, K, dtype=torch.int32),
                bf16(E, 2 * F, D),
                bf16(E, D, F),
                activation=activation,
                gate_up_bias_E2F=biases[0],
                down_bias_ED=biases[1],
            )


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def forms(n: int, k: int) -> dict[str, Affine | Float8 | Table4]:
    float8 = zeros(n, k).view(FLOAT8)
    mins = zeros(n, k // 128, dtype=torch.float32)
    block_scales = zeros(-(-n // 128), -(-k // 128), dtype=torch.float32)
    return {
        "awq": Affine(zeros(n, k), mins.half(), 4, mins_NG=mins),
        "q8_0": Affine(zeros(n, k), zeros(n, k // 32, dtype=torch.float16), 8, 128),
        "mxfp4": Table4(zeros(n, k), zeros(n, k // 32)),
        "float8 words": Float8(float8, zeros(n, dtype=torch.float32)),
        "float8": Float8(float8, zeros(n, dtype=torch.float32), rounds="float8 token"),
        "float8 blocks": Float8(float8, block_scales, (128, 128), rounds="float8 group"),
        "int8": Affine(zeros(n, k), zeros(n, 1, dtype=torch.float32), 8, 128, rounds="int8 token"),
    }


def packed() -> None:
    for form in forms(256, 1024).values():
        w = words.pack(form)
        inputs, scales = rows.round_inputs(bf16(1, 1024), w)
        few.linear_silu_mul(inputs, w, scales=scales, dtype=torch.bfloat16)
        inputs, scales = rows.round_inputs(bf16(64, 1024), w)
        tiles.linear(inputs, w, scales=scales, dtype=torch.bfloat16)
        many_rows.unpack(w, torch.bfloat16)


def packed_experts() -> None:
    K, E, D, F = 4, 4, 768, 384
    for name in ("awq", "mxfp4", "float8 blocks"):
        gate_up, down = (words.pack(forms(E * n, k)[name]) for n, k in ((2 * F, D), (D, F)))
        for T in (1, 16):
            ids = torch.empty(T, K, dtype=torch.int32)
            given = words.ExpertWords(gate_up, E), words.ExpertWords(down, E)
            moe.experts(bf16(T, D), torch.empty(T, K), ids, *given)


def overlapped() -> None:
    """Tiles of Hopper, called past their wrapper, which sees that there is no card."""
    tile = Tile(64, 64, 4, 3)
    order = torch.empty(64, dtype=torch.int32)
    for name in ("awq", "mxfp4"):
        w = words.pack(forms(256, 1024)[name] if name == "mxfp4" else paired(256, 1024))
        tiles_hopper.multiply(bf16(64, 256), bf16(64, 1024), w, bf16(256), tile)
        tiles_hopper.multiply(torch.empty(2, 64, 256), bf16(64, 1024), w, None, tile, splits=2)
        experts = Rows(order, order, 4, 2, reads_tokens=True), 2, "silu"
        tiles_hopper.multiply(bf16(64, 64), bf16(32, 1024), w, None, tile, *experts)
        experts = Rows(order, order, 4, 2, reads_tokens=False), 2
        tiles_hopper.multiply(bf16(64, 128), bf16(64, 1024), w, None, tile, *experts)


def few_rows() -> None:
    for M in (1, 5, 64):
        for N in (4096, 24576):
            product = rows_hopper.linear if N == 4096 else rows_hopper.linear_silu_mul
            product(bf16(M, 4096), bf16(N, 4096), bf16(N))
            codes, weight = zeros(M, 4096).view(FLOAT8), zeros(N, 4096).view(FLOAT8)
            of_outputs = rows_hopper.Scales(torch.empty(M, 1), torch.empty(N))
            of_blocks = rows_hopper.Scales(torch.empty(M, 32), None, torch.empty(N // 128, 32))
            for scales in (of_outputs, of_blocks):
                product(codes, weight, scales=scales, dtype=torch.bfloat16)


def paired(n: int, k: int) -> Affine:
    scales = torch.ones(n, k // 128, dtype=torch.float16)
    return Affine(zeros(n, k), scales, 4, 0, TwoLevel(zeros(n, k // 128), -scales))


def routers() -> None:
    for E, D, rule in ROUTERS.values():
        for T, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32), (8192, torch.bfloat16)):
            logits = routing.router_logits(torch.empty(T, D, dtype=dtype), torch.empty(E, D, dtype=dtype))
            routing.route(logits, rule, torch.empty(E) if rule.score == "sigmoid" else None)


def tables(num_rows: int, num_queries: int, context: int) -> AttentionTables:
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * num_queries
    lens = torch.full((num_rows,), context, dtype=torch.int32)
    block_table = torch.zeros(num_rows, -(-context // 16), dtype=torch.int32)
    return AttentionTables(starts, lens, block_table, 16, num_queries)


def attentions() -> None:
    for H, K, D, options in (
        (32, 4, 128, {}),
        (64, 8, 64, {"window": 128, "sinks_H": bf16(64)}),
        (8, 4, 256, {"softcap": 50.0}),
        (8, 2, 512, {}),
    ):
        for num_queries in (1, 64):
            q, cache = bf16(2 * num_queries, H, D), bf16(512, 2, 16, K, D)
            attention.paged_attention(q, cache, tables(2, num_queries, 4096), scale=0.1, **options)


def latents() -> None:
    for H in (16, 128):
        for num_queries in (1, 64):
            q_latent, q_rope = bf16(2 * num_queries, H, 576).split((512, 64), 2)
            cache = bf16(512, 16, 576)
            mla.latent_attention(q_latent, q_rope, cache, tables(2, num_queries, 4096), scale=0.1)


def rounded_caches() -> None:
    H, K, D = 32, 8, 128
    for dtype in (torch.int8, FLOAT8):
        cache = zeros(512, 2 * 16 * K * D).view(dtype).view(512, 2, 16, K, D)
        scales = torch.empty(512, 2, 16, K)
        qkv = bf16(64, H, D), bf16(64, K, D), bf16(64, K, D)
        where = torch.empty(4096, D), torch.empty(64, dtype=torch.int64), cache, torch.empty(64, dtype=torch.int64)
        rope_and_write(*qkv, *where, scales=scales)
        for num_queries in (1, 64):
            given = tables(2, num_queries, 4096)
            attention.paged_attention(bf16(2 * num_queries, H, D), cache, given, scale=0.1, scales=scales)
    q_latent, q_rope = bf16(2, 16, 576).split((512, 64), 2)
    latent_cache, latent_scales = zeros(512, 16, 576).view(FLOAT8), torch.empty(512, 16, 2)
    mla.latent_attention(q_latent, q_rope, latent_cache, tables(2, 1, 4096), scale=0.1, scales=latent_scales)
    place = torch.empty(4096, 64), torch.empty(2, dtype=torch.int64), latent_cache, torch.empty(2, dtype=torch.int64)
    mla.norm_rope_and_write(bf16(2, 16, 64), bf16(2, 576), bf16(512), 1e-6, *place, scales=latent_scales)


ALL = experts, packed, packed_experts, overlapped, few_rows, routers, attentions, latents, rounded_caches
GROUPS = {group.__name__: group for group in ALL}


class Driver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(launched: Callable) -> Callable:
    """`JITFunction.run` that compiles instead of launching, and prints each kernel once."""
    seen = set()

    def run(self: JITFunction, *args, grid: object, warmup: bool, **options) -> CompiledKernel:
        kernel = launched(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps({"kernel": self.__name__, "shared_bytes": kernel.metadata.shared}), flush=True)
        return kernel

    return run


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    driver.set_active(Driver((major, minor)))
    JITFunction.run = compiling(JITFunction.run)
    answers = {
        "pdl": lambda x: major >= 9,
        "num_multiprocessors": lambda x: NUM_MULTIPROCESSORS,
        "capability": lambda: (major, minor),
    }
    packed_linear = few, rows, cuts, tiles, tiles_hopper, many_rows
    for module in (launch, attention, triton_codes, mla, moe, triton_sort, routing, rows_hopper, *packed_linear):
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)
    GROUPS[sys.argv[2]]()


if __name__ == "__main__":
    main()
