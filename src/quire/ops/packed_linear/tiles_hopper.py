"""Tiles of packed weights as in `tiles.py`, for Hopper: faster from some ten rows to a thousand; twin: `words.py`.

Called by `tiles.py`. Knows tensors only. Takes weights that are scaled as they are decoded (four-bit whole numbers with
pairs, E2M1). It is written in Gluon, where a program says itself what Triton otherwise decides: codes and inputs come
through the copy engine, which costs no instructions; half of a run's weights are decoded while tensor cores multiply
the other half; and the first codes are under way before the inputs exist. Nothing interprets Gluon, so tests compile
this kernel, and compare it with its twin where there is a card.

Shape letters: M rows, N outputs, K inputs, W words of a row of codes, G groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.ops.hopper import ask_for_inputs, ask_for_weights, described, new_barriers, wait_for_all_warps
from quire.ops.launch import TRITON_DTYPES, options, pdl
from quire.ops.moe.activation import gated
from quire.ops.moe.triton_sort import sorted_rows
from quire.ops.packed_linear.cuts import Rows, Tile
from quire.ops.packed_linear.decode import GAIN, decode, joined, power
from quire.ops.packed_linear.words import RUN, WordWeight

WORDS = gl.constexpr(RUN)  # of a row of codes, in a step
LINE = gl.constexpr(64)  # inputs, 128 bytes: of which tensor cores take columns in one go
LINE_PLANES = gl.constexpr(4)  # that decode to a line


def multiply(
    y: Tensor,
    x_MK: Tensor,
    w: WordWeight,
    bias: Tensor | None,
    tile: Tile,
    rows: Rows | None = None,
    num_experts: int = 1,
    activation: str | None = None,
    splits: int = 1,
) -> None:
    """As `tiles.multiply`."""
    scales_NG = w.scales_NG
    if scales_NG is None:
        raise ValueError("a weight without scales of groups")
    if rows is not None and rows.reads_tokens:
        x_MK = sorted_rows(x_MK, rows.order, rows.top_k)
    M = y.shape[-2]
    N = w.n // num_experts // (2 if activation else 1)
    num_tiles = triton.cdiv(M, tile.block_m) if rows is None else rows.max_tiles
    constants = w.constants()
    dependent = pdl(x_MK)
    _overlapped_tiles_kernel[num_tiles * triton.cdiv(N, tile.block_n), splits](
        y,
        described(x_MK, tile.block_m, RUN * w.planes),
        described(w.codes, tile.block_n, RUN),
        scales_NG,
        w.outer_N,
        bias,
        None if rows is None else rows.order,
        None if rows is None else rows.tiles,
        M,
        N=N,
        K=w.k,
        W=constants["W"],
        KIND=w.kind,
        BITS=w.bits,
        PLANES=w.planes,
        SCALES=RUN * w.planes // w.set_inputs,
        GROUP=w.group,
        G=constants["G"],
        PAIR=w.pair,
        BYTES="exponents" if scales_NG.dtype == torch.uint8 else "float8",
        IN_PARTS=splits > 1,
        SCATTERS=rows is not None and activation is None,
        ACTIVATION=activation,
        DTYPE=TRITON_DTYPES[x_MK.dtype],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        PDL=dependent,
        num_warps=tile.num_warps,
        **options(dependent),
    )


@gluon.jit(do_not_specialize=["M"])
def _overlapped_tiles_kernel(
    y_ptr,
    x_desc,
    codes_desc,
    scales_ptr,
    outer_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    W: gl.constexpr,
    KIND: gl.constexpr,
    BITS: gl.constexpr,
    PLANES: gl.constexpr,
    SCALES: gl.constexpr,
    GROUP: gl.constexpr,
    G: gl.constexpr,
    PAIR: gl.constexpr,
    BYTES: gl.constexpr,
    IN_PARTS: gl.constexpr,
    SCATTERS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A program has BLOCK_N outputs of one tile's rows, of all inputs or one part of them; a step is a run of words."""
    HALVES: gl.constexpr = 1 if ACTIVATION is None else 2
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_STEPS: gl.constexpr = W // WORDS
    INPUTS: gl.constexpr = WORDS * PLANES  # of a step
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, k_width=2)

    expert = 0
    if order_ptr is None:
        num_tiles = (M + BLOCK_M - 1) // BLOCK_M  # neighbours have the same weights
        column = gl.program_id(0) // num_tiles * BLOCK_N
        # The last tile has as many rows as the others, if it can: of rows past the end, loads all wait for one line.
        first_row = gl.minimum(gl.program_id(0) % num_tiles * BLOCK_M, gl.maximum(M - BLOCK_M, 0))
        end_row = M
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
    else:  # neighbours have the same rows
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        tile = gl.program_id(0) // COLUMNS
        column = gl.program_id(0) % COLUMNS * BLOCK_N
        if tile >= gl.load(tiles_ptr):
            return
        expert = gl.load(tiles_ptr + 1 + 3 * tile)
        first_row = gl.load(tiles_ptr + 2 + 3 * tile)
        end_row = gl.load(tiles_ptr + 3 + 3 * tile)
    steps = (NUM_STEPS + gl.num_programs(1) - 1) // gl.num_programs(1)
    first = gl.program_id(1) * steps
    end = gl.minimum(first + steps, NUM_STEPS)

    codes = gl.allocate_shared_memory(gl.int32, [STAGES * HALVES, BLOCK_N, WORDS], codes_desc.layout)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, INPUTS], x_desc.layout)
    arrived = new_barriers(STAGES)
    first_output = expert * (HALVES * N) + column
    for slot in gl.static_range(STAGES):
        step = first + slot
        ask_for_weights(codes_desc, codes, x_desc, arrived, first_output, step, slot, N, HALVES, WORDS, step < end)
    if PDL and order_ptr is None:
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES):
        ask_for_inputs(x_desc, x, arrived, first_row, first + slot, slot, INPUTS, first + slot < end)

    n_N = gl.minimum(column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, operand)), N - 1)
    row_N = (expert * (HALVES * N) + n_N).to(gl.int64)
    scales = _load_scales(scales_ptr, row_N, first, N, K, INPUTS, SCALES, GROUP, G, PAIR, HALVES)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, acc_layout)
    acc_up = acc
    slot = 0
    phase = 0
    for step in range(first, end):
        next_scales = _load_scales(scales_ptr, row_N, step + 1, N, K, INPUTS, SCALES, GROUP, G, PAIR, HALVES)
        mbarrier.wait(arrived.index(slot), phase)
        x_MK = x.index(slot)
        gate = codes.index(slot * HALVES)
        acc = _add(acc, gate, x_MK, scales, 0, operand, KIND, BITS, PLANES, PAIR, BYTES, HALVES)
        if HALVES == 2:
            up = codes.index(slot * HALVES + 1)
            acc_up = _add(acc_up, up, x_MK, scales, 1, operand, KIND, BITS, PLANES, PAIR, BYTES, HALVES)
            acc, acc_up = warpgroup_mma_wait(0, deps=(acc, acc_up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        wait_for_all_warps()  # none reads this slot any more
        again = step + STAGES
        ask_for_weights(codes_desc, codes, x_desc, arrived, first_output, again, slot, N, HALVES, WORDS, again < end)
        ask_for_inputs(x_desc, x, arrived, first_row, again, slot, INPUTS, again < end)
        scales = next_scales
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    place_M = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stored))
    to_M = place_M
    if SCATTERS:
        to_M = gl.load(order_ptr + gl.minimum(place_M, end_row - 1))
    to_N = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, stored))
    at_MN = to_M.to(gl.int64)[:, None] * N + to_N[None, :]
    inside_MN = (place_M < end_row)[:, None] & (to_N < N)[None, :]
    if IN_PARTS:
        part_ptr = y_ptr + gl.program_id(1).to(gl.int64) * M * N
        y_MN = gl.convert_layout(gl.permute(acc * power(GAIN), (1, 0)), stored)
        gl.store(part_ptr + at_MN, y_MN.to(y_ptr.dtype.element_ty), inside_MN)
    else:
        y_NM = _finish(acc, outer_ptr, bias_ptr, first_output, column, N)
        if HALVES == 2:
            y_NM = gated(y_NM, _finish(acc_up, outer_ptr, bias_ptr, first_output + N, column, N), ACTIVATION)
        y_MN = gl.convert_layout(gl.permute(y_NM.to(DTYPE), (1, 0)), stored)
        gl.store(y_ptr + at_MN, y_MN.to(y_ptr.dtype.element_ty), inside_MN)


@gluon.jit
def _load_scales(
    scales_ptr,
    row_N,
    step,
    N: gl.constexpr,
    K: gl.constexpr,
    INPUTS: gl.constexpr,
    SCALES: gl.constexpr,
    GROUP: gl.constexpr,
    G: gl.constexpr,
    PAIR: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Of a step's gates, then of its ups: pairs, or words of four bytes. Past the last input, any."""
    loaded: gl.tuple = ()
    for half in gl.static_range(HALVES):
        if PAIR is not None:
            for i in gl.static_range(SCALES):
                input = gl.minimum(step * INPUTS + i * (INPUTS // SCALES), K - 1)
                loaded += (gl.load(scales_ptr + (row_N + half * N) * G + input // GROUP),)
        else:
            words_ptr = scales_ptr.to(gl.pointer_type(gl.int32))
            for i in gl.static_range(SCALES // 4):
                place = gl.minimum(step * (SCALES // 4) + i, G // 4 - 1)
                loaded += (gl.load(words_ptr + (row_N + half * N) * (G // 4) + place),)
    return loaded


@gluon.jit
def _add(
    acc,
    codes,
    x_MK,
    scales,
    half: gl.constexpr,
    operand: gl.constexpr,
    KIND: gl.constexpr,
    BITS: gl.constexpr,
    PLANES: gl.constexpr,
    PAIR: gl.constexpr,
    BYTES: gl.constexpr,
    HALVES: gl.constexpr,
):
    """acc and a step's product, too small by 2 ** GAIN; tensor cores may still be at it."""
    COUNT: gl.constexpr = len(scales) // HALVES
    mine: gl.tuple = ()
    for i in gl.static_range(COUNT):
        mine += (scales[half * COUNT + i],)
    planes = decode(codes.load(operand), None, mine, KIND, BITS, BYTES, PAIR, True)
    for line in gl.static_range(PLANES // LINE_PLANES):
        values = gl.convert_layout(joined(planes, line * LINE_PLANES, LINE_PLANES), operand)
        x_KM = x_MK.slice(line * LINE, LINE, dim=1).permute((1, 0))
        acc = warpgroup_mma(values, x_KM, acc, is_async=True)
    return acc


@gluon.jit
def _finish(acc, outer_ptr, bias_ptr, first_output, column, N: gl.constexpr):
    n_N = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    row_N = first_output + gl.minimum(n_N, N - 1 - column)
    y_NM = acc * power(GAIN)
    if outer_ptr is not None:
        y_NM *= gl.load(outer_ptr + row_N)[:, None]
    if bias_ptr is not None:
        y_NM += gl.load(bias_ptr + row_N).to(gl.float32)[:, None]
    return y_NM
