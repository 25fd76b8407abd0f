"""What attention kernels in Triton share: reading a unit of work, and its end: the output, or a part of a split one.

Used by `triton.py`, `triton_codes.py` and `ops/mla/triton.py`; shape letters are those of `triton.py`.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that a row that has seen no key yet needs no special case: exp2(LOWEST - LOWEST) is 1, and its sum is still
# 0.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def load_unit(units, unit):
    """The columns of a unit, in order."""
    at = units + unit * 8
    row, first_token, num_tokens, position = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    first_key, end_key, num_splits, first_unit = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    return row, first_token, num_tokens, position, first_key, end_key, num_splits, first_unit


@triton.jit
def finish(
    acc_MD,
    max_M,
    sum_M,
    out,
    sinks,
    partials,
    stats,
    counters,
    unit,
    first_unit,
    num_splits,
    kv_head,
    first_token,
    num_tokens,
    out_token_stride,
    out_head_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Writes the output of a tile whose keys were all in one unit. Of a split one, the partial result is stored, and
    the last split to finish merges all of them, in the order of their keys."""
    m_M, d_D = tl.arange(0, TILE_M), tl.arange(0, BLOCK_D)
    is_real_MD = (m_M < num_tokens * G)[:, None] & (d_D < D)[None, :]
    if num_splits == 1:
        token_M, head_M = first_token + m_M // G, kv_head * G + m_M % G
        if sinks is not None:
            max_M, sum_M, alpha_M = _with_sink(max_M, sum_M, tl.load(sinks + head_M))
            acc_MD *= alpha_M[:, None]
        out_M = token_M.to(tl.int64) * out_token_stride + head_M * out_head_stride
        o_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_M[:, None] + d_D[None, :], o_MD, mask=is_real_MD)
    else:
        K = tl.num_programs(0)
        place = (unit * K + kv_head).to(tl.int64)
        tl.store(stats + place * (2 * TILE_M) + m_M, max_M)
        tl.store(stats + place * (2 * TILE_M) + TILE_M + m_M, sum_M)
        partial_M = partials + place * (TILE_M * D) + m_M * D
        tl.store(partial_M[:, None] + d_D[None, :], acc_MD, mask=is_real_MD, cache_modifier=".cg")
        tl.debug_barrier()  # one thread does the atomic below, which must publish what all threads have stored
        counter = counters + first_unit * K + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counter, 0)
            merge(
                out,
                sinks,
                partials,
                stats,
                first_unit,
                num_splits,
                kv_head,
                first_token,
                num_tokens,
                out_token_stride,
                out_head_stride,
                G,
                D,
                BLOCK_D,
                TILE_M,
            )


@triton.jit
def merge(
    out,
    sinks,
    partials,
    stats,
    first_unit,
    num_splits,
    kv_head,
    first_token,
    num_tokens,
    out_token_stride,
    out_head_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """The result of a split tile: X of its rows at a time, SPLITS parts of them loaded at once, in a fixed order.

    Holds few values: if it needed more registers than the loop over keys, fewer programs would fit on a multiprocessor.
    Each part is a tensor of its own, so nothing is summed across threads.
    """
    HELD: tl.constexpr = 64
    ROWS: tl.constexpr = min(triton.next_power_of_2(G), HELD // 2)
    SPLITS: tl.constexpr = min(HELD // ROWS, 8)
    K = tl.num_programs(0)
    x_X, d_D = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    for start in range(0, num_tokens * G, ROWS):
        m_X = start + x_X
        is_real_X = m_X < num_tokens * G
        max_X = tl.full((ROWS,), LOWEST, tl.float32)
        sum_X = tl.zeros((ROWS,), tl.float32)
        acc_XD = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for split in range(0, num_splits, SPLITS):
            maxima: tl.tuple = ()
            sums: tl.tuple = ()
            accs: tl.tuple = ()
            for s in tl.static_range(SPLITS):
                there_X = is_real_X & (split + s < num_splits)
                place = ((first_unit + split + s) * K + kv_head).to(tl.int64)
                stats_X = stats + place * (2 * TILE_M) + m_X
                maxima += (tl.load(stats_X, mask=there_X, other=LOWEST, cache_modifier=".cg"),)
                sums += (tl.load(stats_X + TILE_M, mask=there_X, other=0.0, cache_modifier=".cg"),)
                partial_XD = partials + place * (TILE_M * D) + m_X[:, None] * D + d_D[None, :]
                there_XD = there_X[:, None] & (d_D < D)[None, :]
                accs += (tl.load(partial_XD, mask=there_XD, other=0.0, cache_modifier=".cg"),)
            new_max_X = max_X
            for s in tl.static_range(SPLITS):
                new_max_X = tl.maximum(new_max_X, maxima[s])
            alpha_X = tl.exp2(max_X - new_max_X)
            sum_X, acc_XD, max_X = sum_X * alpha_X, acc_XD * alpha_X[:, None], new_max_X
            for s in tl.static_range(SPLITS):
                weight_X = tl.exp2(maxima[s] - max_X)
                sum_X += sums[s] * weight_X
                acc_XD += accs[s] * weight_X[:, None]
        head_X = kv_head * G + m_X % G
        if sinks is not None:
            max_X, sum_X, alpha_X = _with_sink(max_X, sum_X, tl.load(sinks + head_X, mask=is_real_X, other=0.0))
            acc_XD *= alpha_X[:, None]
        out_X = (first_token + m_X // G).to(tl.int64) * out_token_stride + head_X * out_head_stride
        o_XD = (acc_XD / sum_X[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_X[:, None] + d_D[None, :], o_XD, mask=is_real_X[:, None] & (d_D < D)[None, :])


@triton.jit
def _with_sink(max_M, sum_M, sink_M):
    """A softmax's maximum and sum with one more logit in it, and the factor for what was accumulated so far."""
    sink_M = sink_M.to(tl.float32) * LOG2_E
    new_max_M = tl.maximum(max_M, sink_M)
    alpha_M = tl.exp2(max_M - new_max_M)
    return new_max_M, sum_M * alpha_M + tl.exp2(sink_M - new_max_M), alpha_M
