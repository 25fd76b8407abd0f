"""Penalties for tokens in a row's history, in Triton: the sampler's first stage. Twin: `penalties` of `reference.py`.

Called by `ops/sampling/triton.py`, also inside a CUDA graph. Knows logits, columns of parameters and token histories;
nothing of how tokens are chosen. Three launches: set a row's counts to 0, count its history, replace the counts by the
penalized logits.

Letters: S samples of the step, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl, wait_turn
from quire.ops.sampling.reference import VERY_LARGE, SamplerColumns

__all__ = ["is_penalized", "penalize", "repaired"]

PENALTY_BLOCK = 2048  # tokens of the vocabulary
HISTORY_BLOCK = 1024  # positions

_VERY_LARGE = tl.constexpr(VERY_LARGE)


def penalize(
    logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, columns: SamplerColumns, tokens: Tensor, edited_SV: Tensor
) -> None:
    """Writes the penalized rows' logits to `edited_SV`, float32, contiguous, at least S rows. Other rows are undefined.

    The other arguments are as in `sample` of `ops/sampling/triton.py`.
    """
    num_rows, vocab_size = logits_SV.shape
    dependent = pdl(logits_SV)
    counts = edited_SV.view(torch.int32)
    given = rows_S, columns, columns.temperature.stride(0), columns.seed.stride(0), vocab_size
    flags = {"num_warps": 4, "PDL": dependent, **options(dependent)}
    grid = num_rows, triton.cdiv(vocab_size, PENALTY_BLOCK)
    _forget_kernel[grid](counts, *given, BLOCK=PENALTY_BLOCK, **flags)
    history_grid = num_rows, triton.cdiv(tokens.shape[1], HISTORY_BLOCK)
    _count_kernel[history_grid](counts, positions_S, tokens, tokens.stride(0), *given, BLOCK=HISTORY_BLOCK, **flags)
    # Without fused multiply-add: products and sums are rounded one by one, as in the twin.
    _penalize_kernel[grid](
        edited_SV, counts, logits_SV, logits_SV.stride(0), *given, BLOCK=PENALTY_BLOCK, enable_fp_fusion=False, **flags
    )


@triton.jit
def is_penalized(columns, float_at):
    presence = tl.load(columns.presence_penalty + float_at)
    frequency = tl.load(columns.frequency_penalty + float_at)
    has_output_penalty = (presence != 0.0) | (frequency != 0.0)
    return has_output_penalty | (tl.load(columns.repetition_penalty + float_at) != 1.0)


@triton.jit
def repaired(x):
    """Logits that can be ordered: -inf in place of NaN, a finite number in place of inf."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == float("inf"), _VERY_LARGE, x)


@triton.jit
def _forget_kernel(counts, rows, columns, float_stride, int_stride, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    s = tl.program_id(0)
    wait_turn(PDL)
    row = tl.load(rows + s)
    if row < 0:
        return
    if not is_penalized(columns, row.to(tl.int64) * float_stride):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + s.to(tl.int64) * vocab_size + ids, tl.zeros([BLOCK], tl.int32), mask=ids < vocab_size)


@triton.jit
def _count_kernel(
    counts,
    positions,
    tokens,
    tokens_stride,
    rows,
    columns,
    float_stride,
    int_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """For each token of the vocabulary: 2 * how often it is in the output + whether it is in the prompt."""
    s = tl.program_id(0)
    wait_turn(PDL)
    row = tl.load(rows + s)
    if row < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_history = at < tl.load(positions + s)
    if tl.program_id(1) * BLOCK >= tl.load(positions + s):
        return
    if not is_penalized(columns, row.to(tl.int64) * float_stride):
        return
    ids = tl.load(tokens + row.to(tl.int64) * tokens_stride + at, mask=in_history, other=-1)
    valid = (ids >= 0) & (ids < vocab_size)
    in_output = at >= tl.load(columns.prompt_len + row.to(tl.int64) * int_stride)
    counts += s.to(tl.int64) * vocab_size
    tl.atomic_add(counts + ids, 2, mask=valid & in_output, sem="relaxed")
    tl.atomic_or(counts + ids, 1, mask=valid & ~in_output, sem="relaxed")


@triton.jit
def _penalize_kernel(
    edited,
    counts,
    logits,
    logits_stride,
    rows,
    columns,
    float_stride,
    int_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the row's penalized logits over its counts."""
    s = tl.program_id(0)
    wait_turn(PDL)
    row = tl.load(rows + s)
    if row < 0:
        return
    float_at = row.to(tl.int64) * float_stride
    if not is_penalized(columns, float_at):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = s.to(tl.int64) * vocab_size + ids
    word = tl.load(counts + at, mask=ids < vocab_size, other=0)
    x = tl.load(logits + s.to(tl.int64) * logits_stride + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
    x = repaired(x)
    repetition = tl.load(columns.repetition_penalty + float_at)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    count = (word >> 1).to(tl.float32)
    presence = tl.where(count > 0.0, tl.load(columns.presence_penalty + float_at), 0.0)
    x = tl.where(word != 0, repeated, x) - (count * tl.load(columns.frequency_penalty + float_at) + presence)
    tl.store(edited + at, x, mask=ids < vocab_size)
