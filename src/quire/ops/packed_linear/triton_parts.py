"""What a program of `triton.py` does with the weights that it has loaded: inputs, products, sums of threads, in Triton.

Tensors have an element for each thread, or for each word of its lane. Shape letters: as there.
"""

import triton
import triton.language as tl

from quire.ops.packed_linear.decode import (
    add_byte_products,
    byte_planes,
    float_planes,
    load_row,
    loaded_scale,
    pair_minimum,
    signed_byte,
)
from quire.ops.packed_linear.whole import lane_sums, whole_product, whole_words


@triton.jit
def load_inputs(
    x_ptr,
    x_scales_ptr,
    row,
    x_scales_stride,
    c: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    INPUTS: tl.constexpr,
    X_GROUP: tl.constexpr,
    THREADS: tl.constexpr,
    ROW_THREADS: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """(a chunk's inputs as they are multiplied: "floats", plane by plane; "whole" numbers in pairs; or float8 and int8
    "codes", int8 four in a word; sums of lanes, set by set; what lanes are to be multiplied by)"""
    word_X = tl.arange(0, THREADS * LANE)
    word_X = (c * ROW_THREADS + word_X // LANE % ROW_THREADS) * LANE + word_X % LANE
    lane_T = c * ROW_THREADS + tl.arange(0, THREADS) % ROW_THREADS
    planes: tl.tuple = ()
    sums: tl.tuple = ()
    scale = 1.0
    if INPUTS == "codes":
        words = load_row(x_ptr + row * (K // 4), word_X, K // 4, ROW_THREADS * LANE)
        planes = (words,) if KIND == "int8" else float_planes(words, None, KIND, 8, ON_CARD)
        group = 0 if X_GROUP is None else tl.minimum(lane_T * (LANE * PLANES), K - 1) // X_GROUP
        scale = tl.load(x_scales_ptr + group * x_scales_stride + row)
    elif INPUTS == "whole":
        LANES: tl.constexpr = W // LANE
        row_ptr = x_ptr + row * whole_words(W, PLANES, SETS)
        for pair in tl.static_range(PLANES // 2):
            planes += (load_row(row_ptr + pair * W, word_X, W, ROW_THREADS * LANE),)
        row_ptr += PLANES // 2 * W
        for set in tl.static_range(SETS):
            sums += (load_row(row_ptr + set * LANES, lane_T, LANES, ROW_THREADS),)
        scale = load_row(row_ptr + SETS * LANES, lane_T, LANES, ROW_THREADS).to(tl.float32, bitcast=True)
    else:
        for plane in tl.static_range(PLANES):
            input = word_X // RUN * (RUN * PLANES) + plane * RUN + word_X % RUN
            planes += (load_row(x_ptr + row * K, input, K, PLANES * ROW_THREADS * LANE).to(tl.float32),)
        for set in tl.static_range(SETS):
            total = tl.zeros((THREADS * LANE,), tl.float32)
            for plane in tl.static_range(set * (PLANES // SETS), (set + 1) * (PLANES // SETS)):
                total += planes[plane]
            sums += (lane_sums(total, LANE),)
    return planes, sums, scale


@triton.jit
def zeros(COUNT: tl.constexpr, THREADS: tl.constexpr):
    """So many sums of each thread."""
    sums: tl.tuple = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros((THREADS,), tl.float32),)
    return sums


@triton.jit
def add_chunk(
    sums,
    weights,
    inputs,
    term: tl.constexpr,
    c: tl.constexpr,
    zero,
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
    INPUTS: tl.constexpr,
    TERMS: tl.constexpr,
    HALVES: tl.constexpr,
    THREADS: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """The sums of each turn and half, and a chunk's products."""
    added: tl.tuple = ()
    for i in tl.static_range(len(sums)):
        codes, scales, _, _ = weights[(i // HALVES * TERMS + term) * HALVES + i % HALVES]
        product = _product(
            codes[c], scales[c], inputs, zero, table_ptr, SCALES, SCALES_OUTER, MINS, MINS_OUTER, OFFSET, KIND, BITS,
            PLANES, SETS, IN_WORDS, PAIR, INPUTS, THREADS, LANE, ON_CARD,
        )  # fmt: skip
        added += (sums[i] + product,)
    return added


@triton.jit
def add_term(
    totals,
    sums,
    weight,
    weights,
    term: tl.constexpr,
    OUTER: tl.constexpr,
    BIAS: tl.constexpr,
    TERMS: tl.constexpr,
    HALVES: tl.constexpr,
    THREADS: tl.constexpr,
    ROW_THREADS: tl.constexpr,
):
    """The totals of each turn and half, and a term's sums, scaled and with biases."""
    added: tl.tuple = ()
    for i in tl.static_range(len(totals)):
        _, _, outer, bias = weights[(i // HALVES * TERMS + term) * HALVES + i % HALVES]
        sum_T = sums[i]
        if OUTER:
            sum_T *= outer
        if BIAS:  # counted by the first thread of a row
            sum_T += tl.where(tl.arange(0, THREADS) % ROW_THREADS == 0, bias.to(tl.float32), 0.0)
        added += (totals[i] + weight * sum_T,)
    return added


@triton.jit
def row_sums(total_T, THREADS: tl.constexpr, ROW_THREADS: tl.constexpr):
    """The sum over the threads of a row, for each of them."""
    sums = tl.sum(tl.reshape(total_T, (THREADS // ROW_THREADS, ROW_THREADS)), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(sums, (THREADS // ROW_THREADS, ROW_THREADS)), (THREADS,))


@triton.jit
def _product(
    words,
    scales,
    inputs,
    zero,
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
    INPUTS: tl.constexpr,
    THREADS: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """A chunk's weights times inputs, summed over each lane."""
    x, sums, x_scale = inputs
    if INPUTS == "codes":
        total = _product_of_codes(words, scales, x, SCALES, KIND, THREADS, LANE, ON_CARD)
    else:
        total = _product_by_sets(
            words, scales, x, sums, zero, table_ptr, SCALES, SCALES_OUTER, MINS, MINS_OUTER, OFFSET, KIND, BITS,
            PLANES, SETS, IN_WORDS, PAIR, INPUTS == "whole", THREADS, LANE, ON_CARD,
        )  # fmt: skip
    return total * x_scale


@triton.jit
def _product_of_codes(
    words,
    scales,
    x,
    SCALES: tl.constexpr,
    KIND: tl.constexpr,
    THREADS: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """Of inputs rounded to 8 bits. There is one scale at most."""
    if KIND == "int8":
        products = add_byte_products(tl.zeros((THREADS * LANE,), tl.int32), words, x[0], ON_CARD)
    else:
        values = float_planes(words, None, KIND, 8, ON_CARD)
        products = values[0] * x[0]
        for plane in tl.static_range(1, 4):
            products += values[plane] * x[plane]
    total = lane_sums(products, LANE).to(tl.float32)
    if SCALES:
        total *= loaded_scale(scales, 0, False, None)
    return total


@triton.jit
def _product_by_sets(
    words,
    scales,
    x,
    sums,
    zero,
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
    IS_WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    LANE: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """A lane has a scale, and perhaps a minimum, for each of its sets of planes."""
    # Products of four-bit codes, summed over a lane, times whole numbers of 8 bits: less than 2 ** 31.
    WHOLE_SCALES: tl.constexpr = IS_WHOLE and BITS == 4 and IN_WORDS and SCALES_OUTER and MINS == MINS_OUTER
    NUM_SCALES: tl.constexpr = SCALES + SCALES_OUTER + MINS + MINS_OUTER
    if IS_WHOLE:
        values = byte_planes(words, zero, KIND, BITS, ON_CARD)
    else:
        values = float_planes(words, table_ptr, KIND, BITS, ON_CARD)
    total = tl.zeros((THREADS,), tl.float32)
    whole, whole_mins = tl.zeros((THREADS,), tl.int32), tl.zeros((THREADS,), tl.int32)
    for set in tl.static_range(SETS):
        if IS_WHOLE:
            product = whole_product(values, x, set, PLANES, SETS, LANE, ON_CARD)
        else:
            products = tl.zeros((THREADS * LANE,), tl.float32)
            for plane in tl.static_range(set * (PLANES // SETS), (set + 1) * (PLANES // SETS)):
                products += values[plane] * x[plane]
            product = lane_sums(products, LANE)
        if OFFSET != 0:
            product -= OFFSET * sums[set]
        if WHOLE_SCALES:
            whole += product * signed_byte(scales[0], set)
            if MINS:
                whole_mins += sums[set] * signed_byte(scales[2], set)
        else:
            total += _scaled(
                product.to(tl.float32), sums[set].to(tl.float32), scales, 0 if IN_WORDS else set * NUM_SCALES,
                set if IN_WORDS else None, PAIR, SCALES, SCALES_OUTER, MINS, MINS_OUTER,
            )  # fmt: skip
    if WHOLE_SCALES:
        total = whole.to(tl.float32) * scales[1]
        if MINS:
            total += whole_mins.to(tl.float32) * scales[3]
    return total


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
