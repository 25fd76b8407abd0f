"""Inputs of 16 bits as whole numbers, so that codes of packed weights are multiplied as they are; for `triton.py`.

Knows tensors only. Shape letters: M rows, K inputs; in kernels X words, T lanes of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, options, pdl, wait_turn
from quire.ops.packed_linear.decode import add_products
from quire.ops.packed_linear.words import WordWeight
from quire.ops.rounding.triton import WHOLE_UNITS

LANE_WORDS = 4  # of a weight's row, that a thread loads at once
BLOCK_WORDS = 128  # that a program of one warp has the inputs of


def takes_whole(w: WordWeight, dtype: torch.dtype) -> bool:
    """Whether inputs of this type become whole numbers."""
    return w.rounds is None and w.kind in ("affine", "e2m1") and dtype.itemsize == 2


def whole_numbers(x_MK: Tensor, w: WordWeight) -> Tensor:
    """Rows of inputs as whole numbers of 16 bits, as `w` is multiplied with them: int32 [M, words].

    First pairs of neighbouring planes in the halves of words, in the order of the weight's words; then sums of lanes,
    set after set; then what each lane is to be multiplied by, as the bits of float32. The numbers of a lane share a
    power of two, by the largest: bfloat16 stay exact down to 1/128 of it.
    """
    M, num_words = len(x_MK), w.codes.shape[1]
    sets = w.run * w.planes // w.set_inputs
    whole = torch.empty(M, num_whole_words(num_words, w.planes, sets), dtype=torch.int32, device=x_MK.device)
    dependent = pdl(x_MK)
    _whole_kernel[triton.cdiv(num_words, BLOCK_WORDS), M](
        whole,
        x_MK,
        K=w.k,
        W=num_words,
        KIND=w.kind,
        PLANES=w.planes,
        RUN=w.run,
        SETS=sets,
        LANE=LANE_WORDS,
        BLOCK_W=BLOCK_WORDS,
        ON_CARD=not INTERPRETED,
        PDL=dependent,
        num_warps=1,
        **options(dependent),
    )
    return whole


def num_whole_words(num_words: int, planes: int, sets: int) -> int:
    return num_words * planes // 2 + (sets + 1) * (num_words // LANE_WORDS)


whole_words = triton.constexpr_function(num_whole_words)


@triton.jit
def _whole_kernel(
    whole_ptr,
    x_ptr,
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SETS: tl.constexpr,
    LANE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has the inputs of BLOCK_W of a row's words: a thread those of a lane."""
    THREADS: tl.constexpr = BLOCK_W // LANE
    wait_turn(PDL)
    row = tl.program_id(1).to(tl.int64)
    word_X = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    lane_T = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    planes: tl.tuple = ()
    for plane in tl.static_range(PLANES):
        input = word_X // RUN * (RUN * PLANES) + plane * RUN + word_X % RUN
        planes += (tl.load(x_ptr + row * K + input, mask=input < K, other=0.0).to(tl.float32),)
    planes, step_T = _fixed_point(planes, KIND, LANE)
    pairs = _pairs(planes)
    row_ptr = whole_ptr + row * whole_words(W, PLANES, SETS)
    for pair in tl.static_range(PLANES // 2):
        tl.store(row_ptr + pair * W + word_X, pairs[pair], mask=word_X < W)
    row_ptr += PLANES // 2 * W
    ones = tl.full((BLOCK_W,), 0x01010101, tl.int32)
    for set in tl.static_range(SETS):
        sum_T = whole_product((ones, ones), pairs, set, PLANES, SETS, LANE, ON_CARD)
        tl.store(row_ptr + set * (W // LANE) + lane_T, sum_T, mask=lane_T < W // LANE)
    tl.store(row_ptr + SETS * (W // LANE) + lane_T, step_T.to(tl.int32, bitcast=True), mask=lane_T < W // LANE)


@triton.jit
def _fixed_point(planes, KIND: tl.constexpr, LANE: tl.constexpr):
    """(planes as whole numbers, but for their last bits; what those of each lane are to be multiplied by)"""
    NAN: tl.constexpr = tl.PropagateNan.ALL
    X: tl.constexpr = planes[0].shape[0]
    largest_X = tl.abs(planes[0])
    for plane in tl.static_range(1, len(planes)):
        largest_X = tl.maximum(largest_X, tl.abs(planes[plane]), propagate_nan=NAN)
    bits = tl.reshape(largest_X.to(tl.int32, bitcast=True), (X // LANE, LANE))
    exponent = tl.max(bits, 1, keep_dims=True) >> 23
    is_finite = exponent < 255
    exponent = tl.maximum(exponent, 20)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest becomes 2 ** 14 or more
    inverse_X = tl.reshape(tl.broadcast_to(inverse, (X // LANE, LANE)), (X,))
    step = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    step_T = tl.reshape(tl.where(is_finite, step, float("nan")), (X // LANE,))
    whole: tl.tuple = ()
    for plane in tl.static_range(len(planes)):
        whole += (planes[plane] * inverse_X,)
    return whole, step_T * 0.5 if KIND == "e2m1" else step_T


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
def whole_product(
    bytes, pairs, set: tl.constexpr, PLANES: tl.constexpr, SETS: tl.constexpr, LANE: tl.constexpr, ON_CARD: tl.constexpr
):
    """A set's codes times inputs: whole numbers summed over each lane."""
    FIRST: tl.constexpr = set * PLANES // (2 * SETS)
    END: tl.constexpr = ((set + 1) * PLANES + 2 * SETS - 1) // (2 * SETS)
    total = tl.zeros(bytes[0].shape, tl.int32)
    for i in tl.static_range(FIRST, END):
        numbers = pairs[i]
        if SETS == PLANES:  # of two planes with one instruction, the other one counts nothing
            numbers &= -65536 if set % 2 else 65535
        total = add_products(total, numbers, bytes[i // 2], i % 2 == 1, ON_CARD)
    return lane_sums(total, LANE)


@triton.jit
def lane_sums(values_X, LANE: tl.constexpr):
    """A number for each thread, of what it has for each word of its lane."""
    return tl.sum(tl.reshape(values_X, (values_X.shape[0] // LANE, LANE)), 1)
