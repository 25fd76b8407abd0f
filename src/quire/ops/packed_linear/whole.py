"""Inputs of 16 bits as whole numbers, so that codes of packed weights are multiplied as they are.

Made by `whole_numbers` here or by a norm (`ops/elementwise`), multiplied by `triton.py`. Knows tensors only. The inputs
that are multiplied with a lane of words share a power of two, by the largest: bfloat16 stay exact down to 1/128 of it.

Shape letters: M rows, K inputs; in kernels R runs of words, P planes, L lanes of a run, I words of a lane.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl, wait_turn
from quire.ops.packed_linear.decode import add_products
from quire.ops.packed_linear.words import RUN, WordWeight
from quire.ops.rounding.triton import WHOLE_UNITS

LANE_WORDS = 4  # of a weight's row, that a thread loads at once
PROGRAM_RUNS = 2  # that a program of one warp has the inputs of


def takes_whole(w: WordWeight, dtype: torch.dtype) -> bool:
    """Whether inputs of this type become whole numbers."""
    return w.rounds is None and w.kind in ("affine", "e2m1") and dtype.itemsize == 2


def empty_whole(w: WordWeight, num_rows: int) -> Tensor:
    """Memory for rows of whole numbers: int32 [M, words].

    First pairs of neighbouring planes in the halves of words, in the order of the weight's words; then sums of lanes,
    set after set; then what each lane is to be multiplied by, as the bits of float32.
    """
    size = num_whole_words(w.codes.shape[1], w.planes, w.run * w.planes // w.set_inputs)
    return torch.empty(num_rows, size, dtype=torch.int32, device=w.codes.device)


def whole_constants(w: WordWeight) -> dict[str, Any]:
    """What `store_whole` wants to know of the weight."""
    num_sets = w.run * w.planes // w.set_inputs
    return {"W": w.codes.shape[1], "KIND": w.kind, "P": w.planes, "SETS": num_sets, "RUN": RUN, "I": LANE_WORDS}


def whole_numbers(x_MK: Tensor, w: WordWeight) -> Tensor:
    """Rows of inputs as `w` is multiplied with them."""
    whole = empty_whole(w, len(x_MK))
    dependent = pdl(x_MK)
    _whole_kernel[triton.cdiv(w.codes.shape[1], PROGRAM_RUNS * RUN), len(x_MK)](
        whole,
        x_MK,
        K=w.k,
        R=PROGRAM_RUNS,
        **whole_constants(w),
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
    R: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    P: tl.constexpr,
    SETS: tl.constexpr,
    RUN: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    PDL: tl.constexpr,
):
    """A program has the inputs of R of a row's runs."""
    wait_turn(PDL)
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * (R * RUN * P) + tl.arange(0, R * RUN * P)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_whole(whole_ptr + row * whole_words(W, P, SETS), x, tl.program_id(0) * R, W, KIND, P, SETS, RUN, I)


@triton.jit
def store_whole(
    row_ptr,
    x,
    first_run,
    W: tl.constexpr,
    KIND: tl.constexpr,
    P: tl.constexpr,
    SETS: tl.constexpr,
    RUN: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
):
    """Stores a row's inputs from this run on, in float32, as whole numbers (`empty_whole`)."""
    L: tl.constexpr = RUN // I
    R: tl.constexpr = x.shape[0] // (RUN * P)
    x_RPLI = tl.reshape(x, (R, P, L, I))
    bits = tl.abs(x_RPLI).to(tl.int32, bitcast=True)
    exponent_RL = tl.max(tl.max(bits, 3), 1) >> 23
    is_finite = exponent_RL < 255
    exponent_RL = tl.maximum(exponent_RL, 20)
    inverse_RL = ((268 - exponent_RL) << 23).to(tl.float32, bitcast=True)  # the largest becomes 2 ** 14 or more
    # The last bits of a number of so many units are a whole number.
    whole_RPLI = (x_RPLI * inverse_RL[:, None, :, None] + WHOLE_UNITS).to(tl.int32, bitcast=True)
    pairs = tl.permute(tl.reshape(whole_RPLI, (R, P // 2, 2, L, I)), (0, 1, 3, 4, 2))
    lower, upper = tl.split(pairs)
    run = first_run + tl.arange(0, R)
    lane_RL = run[:, None] * L + tl.arange(0, L)[None, :]
    word = lane_RL[:, None, :, None] * I + tl.arange(0, I)[None, None, None, :]
    pair = tl.arange(0, P // 2)[None, :, None, None]
    tl.store(row_ptr + pair * W + word, (lower & 0xFFFF) | (upper << 16), mask=word < W)
    row_ptr += P // 2 * W
    numbers = tl.reshape((whole_RPLI << 16) >> 16, (R, SETS, P // SETS, L, I))
    sums_RSL = tl.sum(tl.sum(numbers, 4), 2)
    lane = lane_RL[:, None, :]
    set = tl.arange(0, SETS)[None, :, None]
    tl.store(row_ptr + set * (W // I) + lane, sums_RSL, mask=lane < W // I)
    step_RL = ((exponent_RL - 14) << 23).to(tl.float32, bitcast=True)
    step_RL = tl.where(is_finite, step_RL * 0.5 if KIND == "e2m1" else step_RL, float("nan"))
    row_ptr += SETS * (W // I)
    tl.store(row_ptr + lane_RL, step_RL.to(tl.int32, bitcast=True), mask=lane_RL < W // I)


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
