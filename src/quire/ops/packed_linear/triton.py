"""Linear layers of one row with packed weights on GPUs, as fast as these can be read; twin: `words.py` (its layout).

Called by `quant/kept/triton.py`, and by `ops/moe/triton.py` for experts. Knows tensors only. A program loads all of its
weights at once, before its input has been computed, so that with dependent launch memory is never idle between two
layers. Inputs of 16 bits become whole numbers, so that codes are multiplied as they are, two with one instruction
(`whole.py`); inputs that are rounded to int8 are multiplied four at a time; float8, tables and inputs in float32
are multiplied as float32. Zero points are taken out of a sum with the sum of the inputs. Scales multiply sums of
neighbours, not weights (`triton_parts.py`).

A lane is so many words of a row of codes as one thread loads at once, and sums by itself. Shape letters: N outputs, K
inputs, G groups, W words of a row; T tokens, A assignments of tokens to experts; in kernels T threads, X words of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, TRITON_DTYPES, capability, options, pdl
from quire.ops.moe.activation import gated, linear_activation
from quire.ops.packed_linear.decode import E2M1_ZERO, load_row, load_scales
from quire.ops.packed_linear.triton_parts import add_chunk, add_term, load_inputs, row_sums, zeros
from quire.ops.packed_linear.whole import LANE_WORDS, takes_whole, whole_numbers
from quire.ops.packed_linear.words import WordWeight
from quire.ops.rounding.reference import GROUP_INPUTS

MULTIPROCESSORS = 132
THREADS = 128  # of a program
ROW_THREADS = 32  # that divide a row among them, at least
ROW_LANES = 4  # of a row, that a thread has at most, unless all threads divide it
LANES = 8  # of all of its rows: 32 registers
CODE_LANES = 16  # of a linear layer's, where inputs are codes: these take fewer registers


def fits(x_MK: Tensor, w: WordWeight) -> bool:
    return len(x_MK) == 1 and x_MK.is_contiguous()


class Cut(NamedTuple):
    row_threads: int  # that divide a row among them
    turns: int  # outputs of a thread; of a gated layer so many gates, and so many ups

    @property
    def block_n(self) -> int:
        return THREADS // self.row_threads * self.turns


def cut(w: WordWeight, num_rows: int, num_outputs: int, halves: int, terms: int, is_expert: bool) -> Cut:
    """A program has outputs of every half and term."""
    num_lanes = w.codes.shape[1] // LANE_WORDS
    wanted = triton.next_power_of_2(triton.cdiv(num_lanes, ROW_LANES))
    row_threads = min(max(wanted, ROW_THREADS), triton.next_power_of_2(num_lanes), THREADS)
    lanes = triton.cdiv(num_lanes, row_threads) * halves * terms
    room = LANES if is_expert or w.rounds is None else CODE_LANES
    most = num_outputs * num_rows // MULTIPROCESSORS // (THREADS // row_threads)
    return Cut(row_threads, max(1, min(room // lanes, most)))


def linear(
    x_MK: Tensor,
    w: WordWeight,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T + b, summed in float32, rounded to x's dtype, then converted to `out_dtype`.

    `scales`: of inputs that are codes, as `w` wants them; `dtype`: what they were before.
    """
    dtype = dtype or x_MK.dtype
    y_MN = torch.empty(len(x_MK), w.n, dtype=out_dtype or dtype, device=x_MK.device)
    _launch(y_MN, x_MK, scales, w, bias_N, dtype)
    return y_MN


def linear_silu_mul(
    x_MK: Tensor,
    w: WordWeight,
    bias_N: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """silu(gate) * up; gate is the first half of the outputs, up the second."""
    dtype = dtype or x_MK.dtype
    y_MF = torch.empty(len(x_MK), w.n // 2, dtype=dtype, device=x_MK.device)
    _launch(y_MF, x_MK, scales, w, bias_N, dtype, halves=2, activation=linear_activation(dtype))
    return y_MF


class Assigned(NamedTuple):
    """Who goes where, for products of experts."""

    expert_ids: Tensor  # int32 [T, experts of a token]
    weights: Tensor  # float32, of the same shape
    num_experts: int


def gate_up_experts(
    x_TD: Tensor,
    scales: Tensor | None,
    w: WordWeight,
    bias: Tensor | None,
    to: Assigned,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    """activation(gate) * up of every assignment, [A, F]; each reads its expert's weights by itself."""
    F = w.n // to.num_experts // 2
    h_AF = torch.empty(to.expert_ids.numel(), F, dtype=dtype, device=x_TD.device)
    _launch(h_AF, x_TD, scales, w, bias, dtype, halves=2, activation=activation, to=to)
    return h_AF


def down_experts(
    h_AF: Tensor,
    scales: Tensor | None,
    w: WordWeight,
    bias: Tensor | None,
    to: Assigned,
    added_TD: Tensor | None,
    dtype: torch.dtype,
    follows_gate_up: bool = False,
) -> Tensor:
    """The weighted sum of the products of each token's assignments, [T, D].

    `follows_gate_up`: `gate_up_experts` was launched before. It lets no other kernel start before the ids are there, so
    this one need not wait for them.
    """
    T, top_k = to.expert_ids.shape
    y_TD = torch.empty(T, w.n // to.num_experts, dtype=dtype, device=h_AF.device)
    _launch(y_TD, h_AF, scales, w, bias, dtype, terms=top_k, to=to, added=added_TD, follows_gate_up=follows_gate_up)
    return y_TD


def _launch(
    y: Tensor,
    x: Tensor,
    x_scales: Tensor | None,
    w: WordWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    halves: int = 1,
    terms: int = 1,
    activation: str | None = None,
    to: Assigned | None = None,
    added: Tensor | None = None,
    follows_gate_up: bool = False,
) -> None:
    if w.order_K is not None:
        x = x.index_select(1, w.order_K)
    w = w.in_words
    rows, N = y.shape
    found = cut(w, rows, N, halves, terms, to is not None)
    inputs = "codes" if x_scales is not None else "floats"
    if takes_whole(w, dtype):
        x, inputs = whole_numbers(x, w), "whole"
    dependent = pdl(x)
    _words_kernel[triton.cdiv(N, found.block_n), rows](
        x.view(torch.int32) if inputs == "codes" else x,
        x_scales,
        *w.arguments(),
        bias,
        added,
        None if to is None else to.expert_ids,
        None if to is None else to.weights,
        y,
        0 if x_scales is None else x_scales.stride(1),
        N,
        **w.constants(),
        SETS=w.run * w.planes // w.set_inputs,
        IN_WORDS=w.scales_in_words,
        ZERO=E2M1_ZERO.value if inputs == "whole" and w.kind == "e2m1" else w.zero,
        INPUTS=inputs,
        X_GROUP=GROUP_INPUTS if x_scales is not None and x_scales.shape[1] > 1 else None,
        TOP_K=to.expert_ids.shape[1] if to else 1,
        TERMS=terms,
        HALVES=halves,
        ACTIVATION=activation,
        DTYPE=TRITON_DTYPES[dtype],
        THREADS=THREADS,
        ROW_THREADS=found.row_threads,
        TURNS=found.turns,
        LANE=LANE_WORDS,
        WAITS_FOR_IDS=to is not None and not follows_gate_up,
        ON_CARD=not INTERPRETED and (w.kind != "e4m3" or capability() >= (8, 9)),  # older cards convert no float8
        PDL=dependent,
        num_warps=THREADS // 32,
        **options(dependent),
    )


@triton.jit(do_not_specialize=["x_scales_stride"])
def _words_kernel(  # noqa: C901
    x_ptr,
    x_scales_ptr,
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
    x_scales_stride,
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
    INPUTS: tl.constexpr,
    X_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    TERMS: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    THREADS: tl.constexpr,
    ROW_THREADS: tl.constexpr,
    TURNS: tl.constexpr,
    LANE: tl.constexpr,
    WAITS_FOR_IDS: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes outputs of one row; of a gated layer (two halves) gates and ups.

    The row is that of an assignment, or the sum of a token's assignments (terms). Tensors have one dimension, with an
    element for each thread, or a lane of words: so each thread has what it multiplies, in any version of Triton.
    """
    CHUNKS: tl.constexpr = (W // LANE + ROW_THREADS - 1) // ROW_THREADS
    NEIGHBOURS: tl.constexpr = THREADS // ROW_THREADS  # outputs of a turn
    if PDL:
        if WAITS_FOR_IDS:  # a kernel before this one decides which weights to load; kernels after it need not wait
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    thread_T = tl.arange(0, THREADS)
    n = tl.program_id(0) * (NEIGHBOURS * TURNS)
    firsts: tl.tuple = ()  # of the outputs' rows in the weight, of each term and half
    for term in tl.static_range(TERMS):
        first = row * 0
        if ids_ptr is not None:
            # Not from the first-level cache, which may have the ids of a step before.
            first = tl.load(ids_ptr + row * TERMS + term, cache_modifier=".cg").to(tl.int64) * (HALVES * N)
        for half in tl.static_range(HALVES):
            firsts += (first + half * N,)
    weights: tl.tuple = ()  # of each turn, term and half
    for turn in tl.static_range(TURNS):
        for part in tl.static_range(TERMS * HALVES):
            weights += _load_weights(
                codes_ptr, scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr, outer_ptr, bias_ptr, firsts[part],
                n + turn * NEIGHBOURS, N, K, W, PLANES, RUN, SETS, IN_WORDS, GROUP, G, SCALES_GROUPS, MINS_GROUPS, ROWS,
                CHUNKS, THREADS, ROW_THREADS, LANE,
            )  # fmt: skip
    if PDL and not WAITS_FOR_IDS:
        tl.extra.cuda.gdc_wait()
    totals = zeros(TURNS * HALVES, THREADS)
    for term in tl.static_range(TERMS):
        x_row = (row * TERMS + term) // (TOP_K // TERMS)
        sums = zeros(TURNS * HALVES, THREADS)
        for c in tl.static_range(CHUNKS):
            inputs = load_inputs(
                x_ptr, x_scales_ptr, x_row, x_scales_stride, c, K, W, KIND, PLANES, RUN, SETS, INPUTS, X_GROUP,
                THREADS, ROW_THREADS, LANE, ON_CARD,
            )  # fmt: skip
            sums = add_chunk(
                sums, weights, inputs, term, c, N >> 31, table_ptr, scales_ptr is not None,
                scales_outer_ptr is not None, mins_ptr is not None, mins_outer_ptr is not None, ZERO, KIND, BITS,
                PLANES, SETS, IN_WORDS, PAIR, INPUTS, TERMS, HALVES, THREADS, LANE, ON_CARD,
            )  # fmt: skip
        weight = 1.0
        if TERMS > 1:
            weight = tl.load(weights_ptr + row * TERMS + term)
        totals = add_term(
            totals, sums, weight, weights, term, outer_ptr is not None, bias_ptr is not None, TERMS, HALVES, THREADS,
            ROW_THREADS,
        )  # fmt: skip
    for turn in tl.static_range(TURNS):
        y_T = row_sums(totals[turn * HALVES], THREADS, ROW_THREADS)
        if HALVES == 2:
            y_T = gated(y_T, row_sums(totals[turn * HALVES + 1], THREADS, ROW_THREADS), ACTIVATION)
        n_T = n + turn * NEIGHBOURS + thread_T // ROW_THREADS
        is_wanted = (n_T < N) & (thread_T % ROW_THREADS == 0)
        if added_ptr is not None:
            y_T += tl.load(added_ptr + row * N + n_T, mask=is_wanted, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + n_T, y_T.to(DTYPE).to(y_ptr.dtype.element_ty), mask=is_wanted)


@triton.jit
def _load_weights(
    codes_ptr,
    scales_ptr,
    scales_outer_ptr,
    mins_ptr,
    mins_outer_ptr,
    outer_ptr,
    bias_ptr,
    first,
    n,
    N,
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
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    ROW_THREADS: tl.constexpr,
    LANE: tl.constexpr,
):
    """((codes of each chunk, scales and minimums of each chunk and set, scales of outputs, biases),)"""
    SET: tl.constexpr = RUN * PLANES // SETS  # inputs of a run that have one scale
    thread_T = tl.arange(0, THREADS)
    word_X = tl.arange(0, THREADS * LANE)
    # Past the end the last output again: no mask is needed.
    row_X = first + tl.minimum(n + word_X // LANE // ROW_THREADS, N - 1)
    row_T = first + tl.minimum(n + thread_T // ROW_THREADS, N - 1)
    codes: tl.tuple = ()
    scales: tl.tuple = ()
    for c in tl.static_range(CHUNKS):
        place_X = (c * ROW_THREADS + word_X // LANE % ROW_THREADS) * LANE + word_X % LANE
        codes += (load_row(codes_ptr + row_X * W, place_X, W, ROW_THREADS * LANE),)
        lane_T = c * ROW_THREADS + thread_T % ROW_THREADS
        of_chunk: tl.tuple = ()
        for set in tl.static_range(1 if IN_WORDS else SETS):
            input = lane_T * LANE // RUN * (RUN * PLANES) + set * SET
            place = row_T // ROWS * G + tl.minimum(input, K - 1) // GROUP
            of_chunk += load_scales(
                scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr, place, SCALES_GROUPS, MINS_GROUPS, IN_WORDS
            )
        scales += (of_chunk,)
    outer, bias = 1.0, 0.0
    if outer_ptr is not None:
        outer = tl.load(outer_ptr + row_T)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row_T)
    return ((codes, scales, outer, bias),)
