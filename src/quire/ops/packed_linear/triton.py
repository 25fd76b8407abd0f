"""Linear layers of one row with packed weights on GPUs, as fast as these can be read; twin: `words.py` (its layout).

Called by `quant/kept/triton.py`, and by `ops/moe/triton.py` for experts. Knows tensors only. A program has weights of
its next outputs under way while it multiplies (Triton's pipeline for loops: all loads are of four bytes or more), and
asks for its first ones before its input has been computed. Inputs of 16 bits become whole numbers, so that codes are
multiplied as they are, two with one instruction (`_fixed_point`); float8, tables and inputs in float32 are multiplied
as float32. Zero points are taken out of a sum with the sum of the inputs. Scales multiply sums of neighbours, not
weights.

Shape letters: N outputs, K inputs, G groups, W words of a row of codes, R lanes of it: what one thread loads at once,
and sums by itself; T tokens, A assignments of tokens to experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, capability, options, pdl
from quire.ops.moe.activation import gated, linear_activation
from quire.ops.packed_linear.decode import (
    E2M1_ZERO,
    add_products,
    byte_planes,
    fetch_rows,
    float_planes,
    load_row,
    load_scales,
    loaded_scale,
    pair_minimum,
    signed_byte,
)
from quire.ops.packed_linear.words import WordWeight
from quire.ops.rounding.reference import GROUP_INPUTS
from quire.ops.rounding.triton import WHOLE_UNITS, round_planes

MULTIPROCESSORS = 132
STAGES = 3  # of a program's loop: it multiplies weights while those of its next outputs are on their way
SHARED_BYTES = 224 << 10  # of a multiprocessor
LANE_WORDS = 4  # of a row, that a thread loads at once


class Share(NamedTuple):
    """What a program of four warps has of a multiprocessor."""

    tile_bytes: int  # of weights that it loads at once
    num_programs: int  # that fit
    max_registers: int  # of a thread, so that these programs fit


SMALL, LARGE = Share(4 << 10, 8, 64), Share(8 << 10, 4, 128)
SMALL_INPUTS = 32  # that a thread keeps in registers, of a small share


def fits(x_MK: Tensor, w: WordWeight) -> bool:
    return len(x_MK) == 1 and x_MK.is_contiguous()


def fits_experts(w: WordWeight) -> bool:
    """Whether tiles would not be faster: every program would round the inputs of all experts by itself."""
    return w.rounds is None


class Cut(NamedTuple):
    block_n: int  # outputs that a program computes at once; of a gated layer so many gates, and so many ups
    block_w: int  # words of a chunk of a row
    num_warps: int
    num_programs: int  # for one row
    max_registers: int


def cut(w: WordWeight, num_rows: int, num_outputs: int, halves: int, terms: int) -> Cut:
    """A program has outputs of every half and term."""
    num_words = w.codes.shape[1]
    row_bytes = num_words * w.codes.element_size() * halves * terms
    share = SMALL if w.k * terms <= SMALL_INPUTS * 128 else LARGE
    warps = min(16, max(4, triton.next_power_of_2(row_bytes * 4 // share.tile_bytes)))
    block_w = min(triton.next_power_of_2(num_words), warps * 32 * LANE_WORDS)
    block_n = max(1, min(share.tile_bytes // row_bytes, num_outputs * num_rows // MULTIPROCESSORS))
    block_n = 1 << block_n.bit_length() - 1
    scale_bytes = row_bytes // LANE_WORDS * w.loads_of_lane
    shared_bytes = (STAGES - 1) * block_n * (row_bytes + scale_bytes)
    programs = min(share.num_programs * 4 // warps, SHARED_BYTES // shared_bytes)
    most = max(1, programs * MULTIPROCESSORS // num_rows)
    return Cut(block_n, block_w, warps, min(most, triton.cdiv(num_outputs, block_n)), share.max_registers)


def linear(x_MK: Tensor, w: WordWeight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b, summed in float32, rounded to x's dtype, then converted to `out_dtype`."""
    y_MN = torch.empty(len(x_MK), w.n, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    _launch(y_MN, x_MK, w, bias_N)
    return y_MN


def linear_silu_mul(x_MK: Tensor, w: WordWeight, bias_N: Tensor | None = None) -> Tensor:
    """silu(gate) * up; gate is the first half of the outputs, up the second."""
    y_MF = torch.empty(len(x_MK), w.n // 2, dtype=x_MK.dtype, device=x_MK.device)
    _launch(y_MF, x_MK, w, bias_N, halves=2, activation=linear_activation(x_MK.dtype))
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
    w = w.in_words
    rows, N = y.shape
    found = cut(w, rows, N, halves, terms)
    is_whole = w.kind == "int8" or (w.kind in ("affine", "e2m1") and x.element_size() == 2)
    dependent = pdl(x)
    _words_kernel[found.num_programs, rows](
        x,
        *w.arguments(),
        bias,
        added,
        None if to is None else to.expert_ids,
        None if to is None else to.weights,
        y,
        w.input_scale if w.rounds == "float8 static" else None,
        N,
        **w.constants(),
        SETS=w.run * w.planes // w.set_inputs,
        IN_WORDS=w.scales_in_words,
        ZERO=E2M1_ZERO.value if is_whole and w.kind == "e2m1" else w.zero,
        WHOLE=is_whole,
        ROUNDS=w.rounds is not None,
        X_GROUP=GROUP_INPUTS if w.rounds == "float8 group" else None,
        TOP_K=to.expert_ids.shape[1] if to else 1,
        TERMS=terms,
        HALVES=halves,
        ACTIVATION=activation,
        BLOCK_N=found.block_n,
        BLOCK_W=found.block_w,
        LANE=LANE_WORDS,
        LINES=triton.next_power_of_2(triton.cdiv(w.codes.shape[1], 32)),
        STAGES=STAGES,
        ON_CARD=not INTERPRETED and (w.kind != "e4m3" or capability() >= (8, 9)),  # older cards convert no float8
        PDL=dependent,
        num_warps=found.num_warps,
        **({} if INTERPRETED or found.num_warps > 8 else {"maxnreg": found.max_registers}),
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
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    IN_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    PAIR: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    X_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    TERMS: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANE: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes outputs of one row, BLOCK_N at a time; of a gated layer (two halves) gates and ups.

    The row is that of an assignment, or the sum of a token's assignments (terms). A lane of codes has one scale for
    each of its sets of planes.
    """
    CHUNKS: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    PARTS: tl.constexpr = TERMS * HALVES
    R: tl.constexpr = BLOCK_W // LANE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if ids_ptr is not None:  # which weights to load is what a kernel before this one decides
            tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    firsts: tl.tuple = ()  # the first of the outputs' rows in the weight, of each term and half
    for term in tl.static_range(TERMS):
        first = row * 0
        if ids_ptr is not None:
            first = tl.load(ids_ptr + row * TERMS + term).to(tl.int64) * (HALVES * N)
        for half in tl.static_range(HALVES):
            firsts += (first + half * N,)
    if PDL:
        if ids_ptr is None:
            output_N = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            for part in tl.static_range(PARTS):
                fetch_rows(codes_ptr + (firsts[part] + output_N) * W, W, LINES)
            tl.extra.cuda.gdc_wait()
    inputs: tl.tuple = ()  # of each term: what codes multiply, their sums, and scales of both
    for term in tl.static_range(TERMS):
        x_row = (row * TERMS + term) // (TOP_K // TERMS)
        inputs += _inputs(
            x_ptr + x_row * K, input_scale, K, KIND, PLANES, RUN, SETS, WHOLE, ROUNDS, X_GROUP, CHUNKS, BLOCK_W, LANE,
            ON_CARD,
        )  # fmt: skip

    for start in tl.range(tl.program_id(0) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N, num_stages=STAGES):
        n_N = start + tl.arange(0, BLOCK_N)
        output_N = tl.minimum(n_N, N - 1)
        codes, scales = _load_weights(
            codes_ptr, scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr, firsts, output_N,
            K, W, PLANES, RUN, SETS, IN_WORDS, GROUP, G, SCALES_GROUPS, MINS_GROUPS, ROWS, PARTS, BLOCK_W, LANE,
        )  # fmt: skip
        gate_N = tl.zeros((BLOCK_N,), tl.float32)
        y_N = gate_N
        for half in tl.static_range(HALVES):
            gate_N = y_N
            total = tl.zeros((BLOCK_N, R, 1), tl.float32)
            constant_N = tl.zeros((BLOCK_N,), tl.float32)
            for term in tl.static_range(TERMS):
                product = _product(
                    codes, scales, inputs, term, half, table_ptr,
                    scales_ptr is not None, scales_outer_ptr is not None, mins_ptr is not None,
                    mins_outer_ptr is not None, ZERO, KIND, BITS, PLANES, SETS, IN_WORDS, PAIR, WHOLE, ROUNDS, CHUNKS,
                    HALVES, LANE, ON_CARD,
                )  # fmt: skip
                row_N = firsts[term * HALVES + half] + output_N
                weight = 1.0
                if TERMS > 1:
                    weight = tl.load(weights_ptr + row * TERMS + term)
                factor_N = tl.full((BLOCK_N,), 1.0, tl.float32) * weight
                if outer_ptr is not None:
                    factor_N *= tl.load(outer_ptr + row_N)
                total += factor_N[:, None, None] * product
                if bias_ptr is not None:
                    constant_N += weight * tl.load(bias_ptr + row_N).to(tl.float32)
            y_N = tl.sum(tl.reshape(total, (BLOCK_N, R)), 1) + constant_N
        if HALVES == 2:
            y_N = gated(gate_N, y_N, ACTIVATION)
        if added_ptr is not None:
            y_N += tl.load(added_ptr + row * N + output_N).to(tl.float32)
        y_N = y_N.to(x_ptr.dtype.element_ty).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N + n_N, y_N, mask=n_N < N)


@triton.jit
def _load_weights(
    codes_ptr,
    scales_ptr,
    scales_outer_ptr,
    mins_ptr,
    mins_outer_ptr,
    firsts,
    output_N,
    K: tl.constexpr,
    W: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    IN_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANE: tl.constexpr,
):
    """(codes, part by part, of each its chunks; of every chunk and set scales, minimums, and their outer ones).

    Nothing is loaded past the last output.
    """
    CHUNKS: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    R: tl.constexpr = BLOCK_W // LANE
    SET: tl.constexpr = RUN * PLANES // SETS  # inputs of a run that have one scale
    codes: tl.tuple = ()
    scales: tl.tuple = ()
    for part in tl.static_range(PARTS):
        row = (firsts[part] + output_N)[:, None, None]
        for c in tl.static_range(CHUNKS):
            word = (c * R + tl.arange(0, R)[None, :, None]) * LANE + tl.arange(0, LANE)[None, None, :]
            codes += (load_row(codes_ptr + row * W, word, W, BLOCK_W),)
    for part in tl.static_range(PARTS):
        row = (firsts[part] + output_N)[:, None, None]
        for c in tl.static_range(CHUNKS):
            lane = c * R + tl.arange(0, R)[None, :, None]
            for set in tl.static_range(1 if IN_WORDS else SETS):
                input = lane * LANE // RUN * (RUN * PLANES) + set * SET
                place = row // ROWS * G + tl.minimum(input, K - 1) // GROUP
                scales += load_scales(
                    scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr, place, SCALES_GROUPS, MINS_GROUPS,
                    IN_WORDS,
                )  # fmt: skip
    return codes, scales


@triton.jit
def _inputs(
    row_ptr,
    input_scale,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    X_GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """(inputs [1, R, LANE] of every chunk and plane, or whole numbers as `_pairs` has them; sums of lanes of
    every chunk and set; and what both are to be multiplied by, of each chunk, if they are rounded or whole)."""
    R: tl.constexpr = BLOCK_W // LANE
    planes: tl.tuple = ()
    scales: tl.tuple = ()
    for c in tl.static_range(CHUNKS):
        lane = c * R + tl.arange(0, R)[None, :, None]
        if RUN == 1:  # neighbouring inputs are of different planes
            halves: tl.tuple = ()  # of a lane: as much as a thread loads at once, so that threads have whole lanes
            for half in tl.static_range(2):
                input = lane * (LANE * PLANES) + half * 8 + tl.arange(0, 8)[None, None, :]
                halves += (load_row(row_ptr, input, K, PLANES * BLOCK_W),)
            planes += _byte_planes(halves)
        else:
            word = lane * LANE + tl.arange(0, LANE)[None, None, :]
            for plane in tl.static_range(PLANES):
                input = word // RUN * (RUN * PLANES) + plane * RUN + word % RUN
                planes += (load_row(row_ptr, input, K, PLANES * BLOCK_W).to(tl.float32),)
    if ROUNDS:
        planes, scales = round_planes(planes, input_scale, KIND, X_GROUP, CHUNKS, PLANES, LANE, ON_CARD)
    if WHOLE:
        if not ROUNDS:
            planes, scales = _fixed_point(planes, KIND, CHUNKS, PLANES)
        planes = _pairs(planes)
    sums: tl.tuple = ()
    for c in tl.static_range(CHUNKS):
        for set in tl.static_range(SETS):
            if WHOLE:
                ones = tl.full((1, R, LANE), 0x01010101, tl.int32)
                sums += (_whole_product((ones, ones), planes, c, set, PLANES, SETS, ON_CARD),)
            else:
                total = tl.zeros((1, R, LANE), tl.float32)
                for plane in tl.static_range(set * (PLANES // SETS), (set + 1) * (PLANES // SETS)):
                    total += planes[c * PLANES + plane]
                sums += (tl.sum(total, 2, keep_dims=True),)
    return planes, sums, scales


@triton.jit
def _fixed_point(planes, KIND: tl.constexpr, CHUNKS: tl.constexpr, PLANES: tl.constexpr):
    """(inputs as whole numbers of 16 bits, what those of each chunk are to be multiplied by, [1, R, 1]).

    The numbers of a lane share a power of two, by the largest: bfloat16 stay exact down to 1/128 of it.
    """
    NAN: tl.constexpr = tl.PropagateNan.ALL
    whole: tl.tuple = ()
    steps: tl.tuple = ()
    for c in tl.static_range(CHUNKS):
        largest = tl.abs(planes[c * PLANES])
        for plane in tl.static_range(1, PLANES):
            largest = tl.maximum(largest, tl.abs(planes[c * PLANES + plane]), propagate_nan=NAN)
        exponent = tl.max(largest.to(tl.int32, bitcast=True), 2, keep_dims=True) >> 23
        is_finite = exponent < 255
        exponent = tl.maximum(exponent, 20)
        inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest becomes 2 ** 14 or more
        step = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        step = tl.where(is_finite, step, float("nan"))
        steps += (step * 0.5 if KIND == "e2m1" else step,)
        for plane in tl.static_range(PLANES):
            whole += (planes[c * PLANES + plane] * inverse,)
    return whole, steps


@triton.jit
def _pairs(planes):
    """The nearest whole numbers of two neighbouring planes, in the halves of words."""
    pairs: tl.tuple = ()
    for i in tl.static_range(len(planes) // 2):
        # The last bits of a number of so many units are a whole number.
        lower = (planes[2 * i] + WHOLE_UNITS).to(tl.int32, bitcast=True)
        upper = (planes[2 * i + 1] + WHOLE_UNITS).to(tl.int32, bitcast=True)
        pairs += ((lower & 0xFFFF) | (upper << 16),)
    return pairs


@triton.jit
def _byte_planes(halves):
    """The four planes [1, R, 4] of words of bytes, from both halves [1, R, 8] of lanes of 16 neighbouring inputs."""
    R: tl.constexpr = halves[0].shape[1]
    lanes = tl.permute(tl.join(halves[0], halves[1]), (0, 1, 3, 2))
    even, odd = tl.split(tl.reshape(lanes.to(tl.float32), (1, R, 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _product(
    codes,
    scales,
    inputs,
    term: tl.constexpr,
    half: tl.constexpr,
    table_ptr,
    SCALES: tl.constexpr,
    SCALES_OUTER: tl.constexpr,
    MINS: tl.constexpr,
    MINS_OUTER: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    SETS: tl.constexpr,
    IN_WORDS: tl.constexpr,
    PAIR: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HALVES: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """One part's weights times inputs, summed over each lane, [BLOCK_N, R, 1]."""
    NUM_SCALES: tl.constexpr = SCALES + SCALES_OUTER + MINS + MINS_OUTER
    PART: tl.constexpr = term * HALVES + half
    # Products of four-bit codes, summed over a lane, times whole numbers of 8 bits: less than 2 ** 31.
    WHOLE_SCALES: tl.constexpr = WHOLE and BITS == 4 and IN_WORDS and SCALES_OUTER and MINS == MINS_OUTER
    N: tl.constexpr = codes[0].shape[0]
    R: tl.constexpr = codes[0].shape[1]
    total = tl.zeros((N, R, 1), tl.float32)
    for c in tl.static_range(CHUNKS):
        if WHOLE:
            values = byte_planes(codes[PART * CHUNKS + c], KIND, BITS, ON_CARD)
        else:
            values = float_planes(codes[PART * CHUNKS + c], table_ptr, KIND, BITS, ON_CARD)
        of_chunk = tl.zeros((N, R, 1), tl.float32)
        whole, whole_mins = tl.zeros((N, R, 1), tl.int32), tl.zeros((N, R, 1), tl.int32)
        for set in tl.static_range(SETS):
            sums = inputs[3 * term + 1][c * SETS + set]
            if WHOLE:
                product = _whole_product(values, inputs[3 * term], c, set, PLANES, SETS, ON_CARD)
            else:
                products = tl.zeros((N, R, LANE), tl.float32)
                for plane in tl.static_range(set * (PLANES // SETS), (set + 1) * (PLANES // SETS)):
                    products += values[plane] * inputs[3 * term][c * PLANES + plane]
                product = tl.sum(products, 2, keep_dims=True)
            if OFFSET != 0:
                product -= OFFSET * sums
            if WHOLE_SCALES:
                whole += product * signed_byte(scales[(PART * CHUNKS + c) * NUM_SCALES], set)
                if MINS:
                    whole_mins += sums * signed_byte(scales[(PART * CHUNKS + c) * NUM_SCALES + 2], set)
            else:
                of_chunk += _scaled(
                    product.to(tl.float32), sums.to(tl.float32), scales,
                    (PART * CHUNKS + c if IN_WORDS else (PART * CHUNKS + c) * SETS + set) * NUM_SCALES,
                    set if IN_WORDS else None, PAIR, SCALES, SCALES_OUTER, MINS, MINS_OUTER,
                )  # fmt: skip
        if WHOLE_SCALES:
            of_chunk = whole.to(tl.float32) * scales[(PART * CHUNKS + c) * NUM_SCALES + 1]
            if MINS:
                of_chunk += whole_mins.to(tl.float32) * scales[(PART * CHUNKS + c) * NUM_SCALES + 3]
        if ROUNDS or WHOLE:
            of_chunk *= inputs[3 * term + 2][c]
        total += of_chunk
    return total


@triton.jit
def _whole_product(
    bytes,
    pairs,
    chunk: tl.constexpr,
    set: tl.constexpr,
    PLANES: tl.constexpr,
    SETS: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """A set's codes times inputs: whole numbers summed over each lane, [N, R, 1]."""
    FIRST: tl.constexpr = set * PLANES // (2 * SETS)
    END: tl.constexpr = ((set + 1) * PLANES + 2 * SETS - 1) // (2 * SETS)
    total = tl.zeros(bytes[0].shape, tl.int32)
    for i in tl.static_range(FIRST, END):
        numbers = pairs[chunk * (PLANES // 2) + i]
        if SETS == PLANES:  # of two planes with one instruction, the other one counts nothing
            numbers &= -65536 if set % 2 else 65535
        total = add_products(total, numbers, bytes[i // 2], i % 2 == 1, ON_CARD)
    return tl.sum(total, 2, keep_dims=True)


@triton.jit
def _scaled(
    product,
    sums,
    scales,
    first: tl.constexpr,
    BYTE: tl.constexpr,
    PAIR: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_OUTER: tl.constexpr,
    MINS: tl.constexpr,
    MINS_OUTER: tl.constexpr,
):
    """A set's products times its scale, and its inputs' sum times its minimum; both are in `scales` from `first` on."""
    if SCALES:
        scale = loaded_scale(scales, first, SCALES_OUTER, PAIR, BYTE)
        product *= scale
        if PAIR is not None:
            product += pair_minimum(scales[first], scale, PAIR) * sums
    if MINS:
        product += loaded_scale(scales, first + SCALES + SCALES_OUTER, MINS_OUTER, None, BYTE) * sums
    return product
