"""Linear layers of few rows with packed weights on GPUs, as fast as these can be read; twin: `words.py` (its layout).

Called by `quant/kept/triton.py`, and by `ops/moe/triton.py` for experts. Knows tensors only. A program has all its
weights in flight before its input has been computed, as in `ops/linear/triton.py`. Codes are multiplied without being
converted first: the bits of a whole number, cut out of its word where they are, are a tiny float32 (a subnormal one),
which the inputs make up for by a large power of two. Zero points are taken out of a sum with the sum of the inputs.
Scales multiply sums of neighbours, not weights.

Shape letters: M rows, N outputs, K inputs, G groups, W words (or bytes) of a row of codes, R lanes of it: what one
thread loads at once, and sums by itself; T tokens, A assignments of tokens to experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, options, pdl
from quire.ops.moe.activation import gated
from quire.ops.packed_linear.decode import INPUT_EXPONENT, decode_plane, group_scale, load_row, power
from quire.ops.packed_linear.rounding import round_row
from quire.ops.packed_linear.words import GROUP_INPUTS, RUN, WordWeight

MAX_ROWS = 4
MULTIPROCESSORS = 132
TILE_BYTES = 16 << 10  # of weights that a program has in flight
LANE_BYTES = 16  # of a row, that a thread loads at once
ROUNDED_SILU = "rounded silu"  # an activation: as two operations of the model's dtype round


def few_rows(x_MK: Tensor, w: WordWeight) -> bool:
    return len(x_MK) <= MAX_ROWS and x_MK.is_contiguous()


def cut(w: WordWeight, num_rows: int, num_outputs: int, num_matrices: int) -> tuple[int, int, int]:
    """(outputs of a program, elements of a chunk of a row, warps); a program has so many outputs of every matrix.

    The last two, on which the order of sums depends, are the same for any number of rows.
    """
    itemsize = w.codes.element_size()
    row_bytes = w.codes.shape[1] * itemsize * num_matrices
    warps = min(16, max(4, triton.next_power_of_2(row_bytes * 4 // TILE_BYTES)))
    block_w = min(triton.next_power_of_2(w.codes.shape[1]), warps * 32 * LANE_BYTES // itemsize)
    tile_bytes = TILE_BYTES // 2 if num_rows > 2 and w.planes > 1 else TILE_BYTES  # sums take registers, too
    block_n = max(1, min(tile_bytes // row_bytes, num_outputs // MULTIPROCESSORS))
    return 1 << block_n.bit_length() - 1, block_w, warps


def linear(x_MK: Tensor, w: WordWeight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b, summed in float32, rounded to x's dtype, then converted to `out_dtype`."""
    y_MN = torch.empty(len(x_MK), w.n, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    _launch(y_MN, x_MK, w, bias_N)
    return y_MN


def linear_silu_mul(x_MK: Tensor, w: WordWeight, bias_N: Tensor | None = None) -> Tensor:
    """silu(gate) * up; gate is the first half of the outputs, up the second."""
    y_MF = torch.empty(len(x_MK), w.n // 2, dtype=x_MK.dtype, device=x_MK.device)
    _launch(y_MF, x_MK, w, bias_N, halves=2, activation=ROUNDED_SILU)
    return y_MF


class Assigned(NamedTuple):
    """Who goes where, for products of experts."""

    expert_ids: Tensor  # int32 [T, experts of a token]
    weights: Tensor  # float32, of the same shape
    num_experts: int


def gate_up_experts(x_TD: Tensor, w: WordWeight, bias: Tensor | None, to: Assigned, activation: str) -> Tensor:
    """activation(gate) * up of every assignment, [A, F]; each reads its expert's weights by itself."""
    h_AF = torch.empty(to.expert_ids.numel(), w.n // to.num_experts // 2, dtype=x_TD.dtype, device=x_TD.device)
    _launch(h_AF, x_TD, w, bias, halves=2, activation=activation, to=to)
    return h_AF


def down_experts(h_AF: Tensor, w: WordWeight, bias: Tensor | None, to: Assigned, added_TD: Tensor | None) -> Tensor:
    """The weighted sum of the products of each token's assignments, [T, D]."""
    T, top_k = to.expert_ids.shape
    y_TD = torch.empty(T, w.n // to.num_experts, dtype=h_AF.dtype, device=h_AF.device)
    _launch(y_TD, h_AF, w, bias, terms=top_k, to=to, added=added_TD)
    return y_TD


def _launch(
    y: Tensor,
    x: Tensor,
    w: WordWeight,
    bias: Tensor | None,
    *,
    halves: int = 1,
    terms: int = 1,
    activation: str | None = None,
    to: Assigned | None = None,
    added: Tensor | None = None,
) -> None:
    if w.order_K is not None:
        x = x.index_select(1, w.order_K)
    M, N = (1 if to else len(y)), y.shape[1]
    block_n, block_w, warps = cut(w, M, N, halves * terms)
    dependent = pdl(x)
    _words_kernel[triton.cdiv(N, block_n), len(y) if to else 1](
        x,
        *w.arguments(),
        bias,
        added,
        None if to is None else to.expert_ids,
        None if to is None else to.weights,
        y,
        w.input_scale if w.rounds == "float8 static" else None,
        N,
        M=M,
        RUN=RUN,
        SETS=RUN * w.planes // w.set_inputs if w.planes > 1 else 1,
        **w.constants(),
        ZERO=w.zero,
        X_GROUP=GROUP_INPUTS if w.rounds == "float8 group" else None,
        TOP_K=to.expert_ids.shape[1] if to else 1,
        TERMS=terms,
        HALVES=halves,
        ACTIVATION=activation,
        IS_FLOAT32=x.dtype == torch.float32,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        LANE=LANE_BYTES // w.codes.element_size(),
        ON_CARD=not INTERPRETED,
        PDL=dependent,
        num_warps=warps,
        **options(dependent),
    )


@triton.jit
def _words_kernel(  # noqa: C901
    x_ptr,
    codes_ptr,
    scales_ptr,
    scales_outer_ptr,
    mins_ptr,
    mins_outer_ptr,
    outer_ptr,
    table_ptr,
    bias_ptr,
    added_ptr,
    ids_ptr,
    weights_ptr,
    y_ptr,
    input_scale,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    X_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    TERMS: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N outputs of every row; of a gated layer (two halves), so many gates and so many ups.

    With experts it has one row: that of an assignment, or the sum of a token's assignments (terms). A lane of codes has
    one scale for each of its sets of planes.
    """
    CHUNKS: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    R: tl.constexpr = BLOCK_W // LANE
    SET: tl.constexpr = RUN * PLANES // SETS  # inputs of a run that have one scale
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    OFFSET: tl.constexpr = ZERO + (256 if KIND == "int8" else 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if ids_ptr is not None:  # which weights to load is what a kernel before this one decides
            tl.extra.cuda.gdc_wait()
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1)
    output_N = tl.minimum(n_N, N - 1).to(tl.int64)  # past the end the last one again: no mask is needed
    firsts: tl.tuple = ()  # the outputs' rows in the weight, of each term
    codes: tl.tuple = ()  # chunk by chunk, of one half after the other, of one term after the other
    for term in tl.static_range(TERMS):
        row_N = output_N
        if ids_ptr is not None:
            row_N = tl.load(ids_ptr + row * TERMS + term).to(tl.int64) * (HALVES * N) + output_N
        firsts += (row_N,)
        for half in tl.static_range(HALVES):
            for c in tl.static_range(CHUNKS):
                w_1W = c * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
                codes += (load_row(codes_ptr + (row_N + half * N)[:, None] * W, w_1W, W, BLOCK_W),)
    if PDL:
        if ids_ptr is None:
            tl.extra.cuda.gdc_wait()
    rounded: tl.tuple = ()  # inputs, for codes in bytes: chunk by chunk, of one row of x after the other, of one term …
    x_scales: tl.tuple = ()  # of the same chunks, by lane
    if PLANES == 1:
        for term in tl.static_range(TERMS):
            x_row = ((row * TERMS + term) // (TOP_K // TERMS)).to(tl.int64)
            for m in tl.static_range(M):
                found = round_row(
                    x_ptr + (x_row + m) * K, input_scale, K, KIND, X_GROUP, CHUNKS, BLOCK_W, LANE, ON_CARD
                )
                rounded += found[0]
                x_scales += found[1]
    gates: tl.tuple = ()
    for half in tl.static_range(HALVES):
        totals: tl.tuple = ()  # of each row of x
        constants: tl.tuple = ()
        for _ in tl.static_range(M):
            totals += (tl.zeros((BLOCK_N, R), tl.float32),)
            constants += (tl.zeros((BLOCK_N,), tl.float32),)
        for term in tl.static_range(TERMS):
            row_N = firsts[term] + half * N
            x_row = ((row * TERMS + term) // (TOP_K // TERMS)).to(tl.int64)  # the first of M
            weight = 1.0
            if TERMS > 1:
                weight = tl.load(weights_ptr + row * TERMS + term)
            sums: tl.tuple = ()
            for _ in tl.static_range(M):
                sums += (tl.zeros((BLOCK_N, R), tl.float32),)
            for c in tl.static_range(CHUNKS):
                lane_1R = c * R + tl.arange(0, R)[None, :]
                for set in tl.static_range(SETS):
                    input_1R = tl.minimum(lane_1R * LANE // RUN * (RUN * PLANES) + set * SET, K - 1)
                    if PLANES == 1:
                        input_1R = tl.minimum(lane_1R * LANE, K - 1)
                    products = _products(
                        codes[(term * HALVES + half) * CHUNKS + c], rounded, term * M * CHUNKS + c, CHUNKS,
                        x_ptr + x_row * K, table_ptr, c, set, M, K, KIND, BITS, PLANES, RUN, SETS, BLOCK_W, LANE,
                    )  # fmt: skip
                    place_NR = row_N[:, None] // ROWS * G + input_1R // GROUP
                    scale = 1.0
                    if scales_ptr is not None:
                        scale = group_scale(scales_ptr, scales_outer_ptr, place_NR, SCALES_GROUPS)
                    minimum = 0.0
                    if mins_ptr is not None:
                        minimum = group_scale(mins_ptr, mins_outer_ptr, place_NR, MINS_GROUPS)
                    added: tl.tuple = ()
                    for m in tl.static_range(M):
                        part_NR = products[2 * m]
                        if OFFSET != 0:
                            part_NR -= OFFSET * products[2 * m + 1]
                        part_NR *= scale
                        if mins_ptr is not None:
                            part_NR += minimum * products[2 * m + 1]
                        if PLANES == 1:
                            part_NR *= x_scales[(term * M + m) * CHUNKS + c]
                        added += (sums[m] + part_NR,)
                    sums = added
            more: tl.tuple = ()
            offsets: tl.tuple = ()
            for m in tl.static_range(M):
                factor_N = tl.full((BLOCK_N,), 1.0, tl.float32) * weight
                if outer_ptr is not None:
                    factor_N *= tl.load(outer_ptr + row_N)
                more += (totals[m] + factor_N[:, None] * sums[m],)
                constant_N = constants[m]
                if bias_ptr is not None:
                    constant_N += weight * tl.load(bias_ptr + row_N).to(tl.float32)
                offsets += (constant_N,)
            totals = more
            constants = offsets
        for m in tl.static_range(M):
            y_N = tl.sum(totals[m], 1) + constants[m]
            if added_ptr is not None:
                y_N += tl.load(added_ptr + row.to(tl.int64) * N + output_N).to(tl.float32)
            if HALVES == 2 and half == 0:
                gates += (y_N,)
            else:
                if HALVES == 2:
                    if ACTIVATION == "rounded silu":
                        y_N = _rounded_silu_mul(gates[m], y_N, IS_FLOAT32)
                    else:
                        y_N = gated(gates[m], y_N, ACTIVATION)
                if not IS_FLOAT32:
                    y_N = y_N.to(tl.bfloat16)
                tl.store(y_ptr + (row + m).to(tl.int64) * N + n_N, y_N.to(y_ptr.dtype.element_ty), mask=n_N < N)


@triton.jit
def _rounded_silu_mul(gate, up, IS_FLOAT32: tl.constexpr):
    """silu(gate) * up, rounded at the same points as by two operations of the model's dtype."""
    if IS_FLOAT32:
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = gate.to(tl.bfloat16).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16)
        return gate.to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _products(
    codes,
    rounded,
    first: tl.constexpr,
    STRIDE: tl.constexpr,
    x_ptr,
    table_ptr,
    c: tl.constexpr,
    set: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANE: tl.constexpr,
):
    """For each row of x: a chunk's codes of one set of planes times inputs, and these inputs, both summed over lanes.

    Of kinds without an offset or minimums, the sums of inputs are zero. Codes in bytes multiply inputs from `rounded`,
    those of row m of x at `first + m * STRIDE`.
    """
    R: tl.constexpr = BLOCK_W // LANE
    N: tl.constexpr = codes.shape[0]
    # Words have many planes: their products are summed in place, and over lanes in the end. Bytes have one.
    WIDTH: tl.constexpr = LANE if PLANES > 1 else 1
    found: tl.tuple = ()
    for _ in tl.static_range(M):
        found += (tl.zeros((N, R * WIDTH), tl.float32), tl.zeros((1, R * WIDTH), tl.float32))
    w_1W = c * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    for plane in tl.static_range(set * (PLANES // SETS), (set + 1) * (PLANES // SETS)):
        k_1W = w_1W // RUN * (RUN * PLANES) + plane * RUN + w_1W % RUN  # of bytes, the byte itself
        values = decode_plane(codes, table_ptr, plane, KIND, BITS, PLANES)
        added: tl.tuple = ()
        for m in tl.static_range(M):
            if PLANES == 1:
                x = rounded[first + m * STRIDE].to(tl.float32)
            else:
                x = load_row(x_ptr + m * K, k_1W, K, PLANES * BLOCK_W).to(tl.float32)
            if PLANES == 1:
                product = found[2 * m] + tl.sum(tl.reshape(values * x, (N, R, LANE)), 2)
            elif KIND == "affine":
                product = found[2 * m] + values * (x * power(INPUT_EXPONENT - (plane % (20 // BITS)) * BITS))
            else:
                product = found[2 * m] + values * x
            total = found[2 * m + 1]
            if KIND == "affine" or KIND == "int8":
                total += x if PLANES > 1 else tl.sum(tl.reshape(x, (1, R, LANE)), 2)
            added += (product, total)
        found = added
    summed: tl.tuple = ()
    for m in tl.static_range(M):
        product = found[2 * m]
        total = found[2 * m + 1]
        if PLANES > 1:
            product = tl.sum(tl.reshape(product, (N, R, LANE)), 2)
            total = tl.sum(tl.reshape(total, (1, R, LANE)), 2)
        if PLANES > 1 and KIND == "affine":
            product *= power(149 - INPUT_EXPONENT)
        summed += (product, total)
    return summed
