"""Products of packed weights with more than one row on GPUs, in tiles, on tensor cores; twin: `words.py`.

Called by `quant/kept/triton.py` for linear layers and by `ops/moe/triton.py` for experts, whose rows were sorted by
expert before. Knows tensors only. Weights are decoded in registers and are the left operand, of which tensor cores
want 64 rows. Scales of E2M1 multiply weights, which stay exact; so do pairs of a scale and a zero point, as if the
weight had been unpacked to bfloat16. Others multiply the sums of a group; what its minimum and the code of zero
contribute is taken from the sum of its inputs. Few outputs with many inputs are cut along their inputs, too, and the
parts added up in order by `rescale`.

Shape letters: M rows, N outputs, K inputs, G groups, W words (or bytes) of a row of codes, S inputs that share a scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import INTERPRETED, TRITON_DTYPES, options, pdl
from quire.ops.moe.activation import gated
from quire.ops.packed_linear import tiles_hopper
from quire.ops.packed_linear.cuts import Rows, Tile, cut, overlaps
from quire.ops.packed_linear.decode import (
    GAIN,
    decode,
    fetch_rows,
    joined,
    load_row,
    load_scales,
    loaded_scale,
    power,
)
from quire.ops.packed_linear.rows import rescale
from quire.ops.packed_linear.words import RUN, WordWeight, as_bytes
from quire.ops.rounding.reference import GROUP_INPUTS

BYTES_AT_ONCE = 128  # codes of a row that are multiplied at once, if codes are bytes
FETCHED_LINES = 8  # of a row's codes, each 128 bytes, that are asked for before a program's turn


def linear(
    x_MK: Tensor,
    w: WordWeight,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    splits: int = 1,
) -> Tensor:
    """As `triton.linear`. `tile`, and with it `splits`: another cut than the default, for measuring."""
    dtype = dtype or x_MK.dtype
    if w.order_K is not None:
        x_MK = x_MK.index_select(1, w.order_K)
    if tile is None:
        tile, splits = cut(x_MK, w, dtype)
    y_MN = torch.empty(len(x_MK), w.n, dtype=out_dtype or dtype, device=x_MK.device)
    if splits == 1:
        multiply(y_MN, x_MK, scales, w, bias_N, tile, dtype=dtype)
        return y_MN
    sums_SMN = torch.empty(splits, *y_MN.shape, dtype=torch.float32, device=x_MK.device)
    multiply(sums_SMN, x_MK, scales, w, None, tile, dtype=dtype, splits=splits)
    row_scales = scales if scales is not None and scales.shape[1] == 1 else None
    rescale(y_MN, sums_SMN, row_scales, w.outer_N, bias_N, dtype)
    return y_MN


def multiply(
    y: Tensor,
    x: Tensor,
    scales: Tensor | None,
    w: WordWeight,
    bias: Tensor | None,
    tile: Tile,
    *,
    dtype: torch.dtype,
    rows: Rows | None = None,
    num_experts: int = 1,
    activation: str | None = None,
    splits: int = 1,
) -> None:
    """One product. With `activation` the two halves of a weight's (or of an expert's) outputs are gate and up.

    With `splits` y are the sums of each part of the inputs, without what `rescale` multiplies and adds.
    """
    if overlaps(x, w):
        tiles_hopper.multiply(y, x, w, bias, tile, rows, num_experts, activation, splits)
        return
    M = y.shape[-2]
    N = w.n // num_experts // (2 if activation else 1)
    num_tiles = triton.cdiv(M, tile.block_m) if rows is None else rows.max_tiles
    set_inputs = w.set_inputs if w.planes > 1 else BYTES_AT_ONCE
    is_folded = w.folds_scales or w.pair is not None
    dependent = pdl(x)
    _tiles_kernel[num_tiles * triton.cdiv(N, tile.block_n), splits](
        y,
        as_bytes(x),
        scales,
        *w.arguments(),
        bias,
        None if rows is None else rows.order,
        None if rows is None else rows.tiles,
        0 if scales is None else scales.stride(1),
        M,
        N=N,
        **w.constants() | {"RUN": RUN if w.planes > 1 else BYTES_AT_ONCE},
        SET=set_inputs,
        FOLDED=is_folded,
        IN_PLACE=is_folded and (w.pair is not None or tile.block_m <= 64),
        BYTES="exponents" if w.scales_NG is not None and w.scales_NG.dtype == torch.uint8 else "float8",
        OFFSET=w.zero + (128 if w.bits == 4 else 0),
        X_GROUPS=0 if scales is None else scales.shape[1],
        X_GROUP=GROUP_INPUTS,
        TOP_K=rows.top_k if rows else 1,
        READS_TOKENS=rows is not None and rows.reads_tokens,
        ACTIVATION=activation,
        DTYPE=TRITON_DTYPES[dtype],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        RUNS=tile.runs,
        FETCHED=FETCHED_LINES,
        ON_CARD=not INTERPRETED and dtype != torch.float32,
        PDL=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options(dependent),
    )


@triton.jit(do_not_specialize=["M", "x_scales_stride"])
def _tiles_kernel(  # noqa: C901
    y_ptr,
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
    order_ptr,
    tiles_ptr,
    x_scales_stride,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    RUN: tl.constexpr,
    SET: tl.constexpr,
    FOLDED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    PAIR: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    OFFSET: tl.constexpr,
    X_GROUPS: tl.constexpr,
    X_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    READS_TOKENS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    FETCHED: tl.constexpr,
    ON_CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has BLOCK_N outputs of one tile's rows, of all inputs or one part of them."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    SCALE_SETS: tl.constexpr = RUN * PLANES // SET
    SETS: tl.constexpr = 1 if FOLDED else SCALE_SETS  # products of a run
    NUM_STEPS: tl.constexpr = (W + RUNS * RUN - 1) // (RUNS * RUN)
    SCALES: tl.constexpr = scales_ptr is not None and not FOLDED  # of sums
    SCALES_OUTER: tl.constexpr = scales_outer_ptr is not None
    MINS: tl.constexpr = mins_ptr is not None
    MINS_OUTER: tl.constexpr = mins_outer_ptr is not None
    # Of a set there are so many factors of outputs, and with those of rows so many in all.
    FACTORS_N: tl.constexpr = SCALES + SCALES_OUTER + MINS + MINS_OUTER
    FACTORS: tl.constexpr = HALVES * FACTORS_N + (X_GROUPS > 1)
    expert = tl.zeros((), tl.int64)
    if PDL and order_ptr is not None:
        tl.extra.cuda.gdc_wait()
    if order_ptr is None:
        num_tiles = (M + BLOCK_M - 1) // BLOCK_M  # neighbours have the same weights
        column = tl.program_id(0) // num_tiles
        place_M = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        inside_M = place_M < M
        # Past the end each reads another row: reads of one row by all programs would wait for each other.
        from_M = tl.where(inside_M, place_M, tl.arange(0, BLOCK_M) % M)
        to_M = from_M
        column_M = place_M  # of scales, which there are for rows past the end, too
    else:  # neighbours have the same rows
        tile = tl.program_id(0) // COLUMNS
        column = tl.program_id(0) % COLUMNS
        if tile >= tl.load(tiles_ptr):
            return
        expert = tl.load(tiles_ptr + 1 + 3 * tile).to(tl.int64)
        place_M = tl.load(tiles_ptr + 2 + 3 * tile) + tl.arange(0, BLOCK_M)
        end = tl.load(tiles_ptr + 3 + 3 * tile)
        inside_M = place_M < end
        place_M = tl.minimum(place_M, end - 1)
        assignment_M = tl.load(order_ptr + place_M)
        from_M = assignment_M // TOP_K if READS_TOKENS else place_M
        to_M = place_M if READS_TOKENS else assignment_M
        column_M = from_M
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
    row_N = expert * (HALVES * N) + tl.minimum(n_N, N - 1)  # past the end the last one again: no mask is needed
    steps = (NUM_STEPS + tl.num_programs(1) - 1) // tl.num_programs(1)
    first = tl.program_id(1) * steps
    w_W = tl.arange(0, RUN)
    k_S = tl.arange(0, RUN * PLANES // SETS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if order_ptr is None:
            if PLANES > 1:
                fetch_rows(codes_ptr + row_N * W + first * (RUNS * RUN), W - first * (RUNS * RUN), FETCHED)
            tl.extra.cuda.gdc_wait()
    ones = tl.full((BLOCK_N, RUN * PLANES // SETS), 1.0, tl.bfloat16 if ON_CARD else tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if KIND == "int8" else tl.float32)
    acc_up = acc
    sums_scales_ptr = scales_ptr if SCALES else None
    factors = _load_factors(
        sums_scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr, x_scales_ptr, row_N, column_M, first,
        x_scales_stride, N, K, RUN * PLANES, SET, GROUP, G, SCALES_GROUPS, MINS_GROUPS, ROWS, RUNS,
        HALVES, X_GROUPS, X_GROUP,
    )  # fmt: skip
    for step in range(first, tl.minimum(first + steps, NUM_STEPS)):
        # A step ahead of their use: the loop's pipeline has loads for products only.
        next_factors = _load_factors(
            sums_scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr, x_scales_ptr, row_N, column_M,
            step + 1, x_scales_stride, N, K, RUN * PLANES, SET, GROUP, G, SCALES_GROUPS, MINS_GROUPS,
            ROWS, RUNS, HALVES, X_GROUPS, X_GROUP,
        )  # fmt: skip
        for i in tl.static_range(RUNS):
            run = step * RUNS + i
            words = load_row(codes_ptr + row_N[:, None] * W, run * RUN + w_W[None, :], W, RUNS * RUN)
            scales = _folded_scales(scales_ptr, row_N, run, K, RUN * PLANES, GROUP, G, SCALE_SETS, FOLDED, PAIR)
            planes = _values(words, table_ptr, scales, KIND, BITS, PLANES, BYTES, PAIR, ON_CARD)
            if HALVES == 2:
                words_up = load_row(codes_ptr + (row_N + N)[:, None] * W, run * RUN + w_W[None, :], W, RUNS * RUN)
                scales = _folded_scales(scales_ptr, row_N + N, run, K, RUN * PLANES, GROUP, G, SCALE_SETS, FOLDED, PAIR)
                planes_up = _values(words_up, table_ptr, scales, KIND, BITS, PLANES, BYTES, PAIR, ON_CARD)
            for set in tl.static_range(SETS):
                k_1S = run * (RUN * PLANES) + set * (RUN * PLANES // SETS) + k_S[None, :]
                x_MS = load_row(x_ptr + from_M.to(tl.int64)[:, None] * K, k_1S, K, RUNS * RUN * PLANES)
                x_MS = _as_operand(x_MS, KIND, PLANES, ON_CARD)
                values = _set_values(planes, set, SETS, PLANES, ON_CARD)
                acc = _add(
                    acc, values, x_MS, ones, factors, (i * SETS + set) * FACTORS, (i * SETS + set + 1) * FACTORS,
                    KIND, FOLDED, IN_PLACE, OFFSET, SCALES, SCALES_OUTER, MINS, MINS_OUTER, X_GROUPS, ON_CARD,
                )  # fmt: skip
                if HALVES == 2:
                    values = _set_values(planes_up, set, SETS, PLANES, ON_CARD)
                    acc_up = _add(
                        acc_up, values, x_MS, ones, factors, (i * SETS + set) * FACTORS + FACTORS_N,
                        (i * SETS + set + 1) * FACTORS, KIND, FOLDED, IN_PLACE, OFFSET, SCALES, SCALES_OUTER, MINS,
                        MINS_OUTER, X_GROUPS, ON_CARD,
                    )  # fmt: skip
        factors = next_factors

    inside_MN = inside_M[:, None] & (n_N < N)[None, :]
    if tl.num_programs(1) > 1:  # parts, in float32
        part_ptr = y_ptr + tl.program_id(1).to(tl.int64) * M * N
        if IN_PLACE:
            acc *= power(GAIN)
        tl.store(part_ptr + to_M.to(tl.int64)[:, None] * N + n_N[None, :], tl.trans(acc.to(tl.float32)), inside_MN)
    else:
        x_scale_M = 1.0
        if X_GROUPS == 1:
            x_scale_M = tl.load(x_scales_ptr + column_M)
        y_NM = _finish(acc, x_scale_M, outer_ptr, bias_ptr, row_N, X_GROUPS, IN_PLACE)
        if HALVES == 2:
            up_NM = _finish(acc_up, x_scale_M, outer_ptr, bias_ptr, row_N + N, X_GROUPS, IN_PLACE)
            y_NM = gated(y_NM, up_NM, ACTIVATION)
        y_MN = tl.trans(y_NM).to(DTYPE).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + to_M.to(tl.int64)[:, None] * N + n_N[None, :], y_MN, inside_MN)


@triton.jit
def _folded_scales(
    scales_ptr,
    row_N,
    run,
    K: tl.constexpr,
    RUN_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    SETS: tl.constexpr,
    FOLDED: tl.constexpr,
    PAIR: tl.constexpr,
):
    """The scales of a run, if weights are multiplied by them: pairs, or words of four bytes."""
    words: tl.tuple = ()
    if FOLDED and PAIR is not None:
        for set in tl.static_range(SETS):
            input = tl.minimum(run * RUN_INPUTS + set * (RUN_INPUTS // SETS), K - 1)
            words += (tl.load(scales_ptr + row_N * G + input // GROUP),)
    elif FOLDED:
        for i in tl.static_range(SETS // 4):
            words += (tl.load(scales_ptr.to(tl.pointer_type(tl.int32)) + row_N * (G // 4) + run * (SETS // 4) + i),)
    return words


@triton.jit
def _values(
    codes,
    table_ptr,
    scales,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    BYTES: tl.constexpr,
    PAIR: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """The planes of a tile of words; bytes are one plane, and stay as they are."""
    if PLANES == 1:
        return (_as_operand(codes, KIND, PLANES, ON_CARD),)
    else:
        return decode(codes, table_ptr, scales, KIND, BITS, BYTES, PAIR, ON_CARD)


@triton.jit
def _as_operand(x, KIND: tl.constexpr, PLANES: tl.constexpr, ON_CARD: tl.constexpr):
    """Codes in bytes as the numbers that they are, others in bfloat16; the interpreter multiplies in float32."""
    if PLANES == 1 and KIND == "e4m3":
        x = x.to(tl.float8e4nv, bitcast=True)
    elif PLANES == 1:
        x = x.to(tl.int8, bitcast=True)
    if not ON_CARD and not (PLANES == 1 and KIND == "int8"):
        x = x.to(tl.float32)
    elif PLANES > 1:  # as weights are
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _set_values(planes, set: tl.constexpr, SETS: tl.constexpr, PLANES: tl.constexpr, ON_CARD: tl.constexpr):
    if PLANES == 1:
        return planes[0]
    else:
        values = joined(planes, set * (PLANES // SETS), PLANES // SETS)
        if ON_CARD:
            values = values.to(tl.bfloat16)
        return values


@triton.jit
def _load_factors(
    scales_ptr,
    scales_outer_ptr,
    mins_ptr,
    mins_outer_ptr,
    x_scales_ptr,
    row_N,
    column_M,
    step,
    x_scales_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    RUN_INPUTS: tl.constexpr,
    SET: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    SCALES_GROUPS: tl.constexpr,
    MINS_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    HALVES: tl.constexpr,
    X_GROUPS: tl.constexpr,
    X_GROUP: tl.constexpr,
):
    """Of every set of a step: scales and minimums of gates, then of ups, then a scale of rows."""
    loaded: tl.tuple = ()
    for i in tl.static_range(RUNS * RUN_INPUTS // SET):
        set = step * (RUNS * RUN_INPUTS // SET) + i
        input = tl.minimum(set * SET, K - 1)
        for half in tl.static_range(HALVES):
            loaded += load_scales(
                scales_ptr, scales_outer_ptr, mins_ptr, mins_outer_ptr,
                (row_N + half * N) // ROWS * G + input // GROUP, SCALES_GROUPS, MINS_GROUPS,
            )  # fmt: skip
        if X_GROUPS > 1:
            loaded += (tl.load(x_scales_ptr + input // X_GROUP * x_scales_stride + column_M),)
    return loaded


@triton.jit
def _add(
    acc,
    values_NS,
    x_MS,
    ones_NS,
    factors,
    first: tl.constexpr,
    end: tl.constexpr,
    KIND: tl.constexpr,
    FOLDED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_OUTER: tl.constexpr,
    MINS: tl.constexpr,
    MINS_OUTER: tl.constexpr,
    X_GROUPS: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """acc and the product of a set: codes times inputs, scaled; and what zero's code and minimums contribute.

    In place, what is added is too small by 2 ** GAIN; tensor cores add it up, which needs the fewest registers.
    `factors` has those of outputs from `first` on, and those of rows before `end`. A product with ones adds up inputs.
    """
    if KIND == "int8":
        return tl.dot(values_NS, tl.trans(x_MS), acc, out_dtype=tl.int32)
    elif IN_PLACE:
        acc = tl.dot(values_NS, tl.trans(x_MS), acc, input_precision="ieee")
        return _finished(acc) if ON_CARD else acc
    elif FOLDED:
        return acc + tl.dot(values_NS, tl.trans(x_MS), input_precision="ieee") * power(GAIN)
    else:
        # Sums of float8 on tensor cores are kept short, since they are added with fewer bits.
        part = tl.dot(values_NS, tl.trans(x_MS), input_precision="ieee")
        if X_GROUPS > 1:
            part *= factors[end - 1][None, :]
        scale_N = tl.full((acc.shape[0],), 1.0, tl.float32)
        if SCALES:
            scale_N = loaded_scale(factors, first, SCALES_OUTER, None)
        acc += scale_N[:, None] * part
        if KIND == "affine":
            shift_N = -OFFSET * scale_N
            if MINS:
                shift_N += loaded_scale(factors, first + SCALES + SCALES_OUTER, MINS_OUTER, None)
            acc += shift_N[:, None] * tl.dot(ones_NS, tl.trans(x_MS), input_precision="ieee")
        return acc


@triton.jit
def _finished(acc):
    """acc, when its products are done: while they go on, the compiler gives their operands' registers away."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _finish(acc, x_scale_M, outer_ptr, bias_ptr, row_N, X_GROUPS: tl.constexpr, IN_PLACE: tl.constexpr):
    y_NM = acc.to(tl.float32)
    if IN_PLACE:
        y_NM *= power(GAIN)
    if outer_ptr is not None:
        y_NM *= tl.load(outer_ptr + row_N)[:, None]
    if X_GROUPS == 1:
        y_NM *= x_scale_M[None, :]
    if bias_ptr is not None:
        y_NM += tl.load(bias_ptr + row_N).to(tl.float32)[:, None]
    return y_NM
