"""How a step begins on a GPU: updates of the persistent batch, then each token's id, position and slot.

Twin: `ops/step/reference.py`. Called by the worker, before the model. The host sends only what changed; everything a
step reads lies on the device, at addresses that never change. Knows arrays and offsets; nothing of requests.

Shape letters: R rows of the step, T its tokens, S its samples, N segments of a message.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def scatter_segments(words: Tensor, segments_N3: Tensor, payload: Tensor, longest: int) -> None:
    """As the twin. `longest` is the largest length of a segment, known where the message was written."""
    grid = (segments_N3.shape[0], triton.cdiv(longest, BLOCK))
    _scatter_segments[grid](words, segments_N3, payload, BLOCK=BLOCK, num_warps=2)


@triton.jit
def _scatter_segments(words, segments, payload, BLOCK: tl.constexpr):
    segment = segments + 3 * tl.program_id(0)
    to, start, length = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + to + at, tl.load(payload + start + at, mask=at < length), mask=at < length)


def place_tokens(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    token_ids_T: Tensor,
    positions_T: Tensor,
    longest: int,
) -> None:
    """As the twin. No row has more than `longest` tokens."""
    block = BLOCK if longest > 1 else 1
    _place_tokens[rows_R.shape[0], triton.cdiv(longest, block)](
        rows_R, starts_R, query_starts, tokens, tokens.stride(0), token_ids_T, positions_T, BLOCK=block, num_warps=1
    )


@triton.jit
def _place_tokens(rows, starts, query_starts, tokens, row_stride, token_ids, positions, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    row, start = tl.load(rows + r).to(tl.int64), tl.load(starts + r).to(tl.int64)
    first, end = tl.load(query_starts + r), tl.load(query_starts + r + 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < end - first
    position = tl.where(row >= 0, start + at, 0)
    token_id = tl.load(tokens + row * row_stride + position, mask=here & (row >= 0), other=0)
    tl.store(token_ids + first + at, token_id, mask=here)
    tl.store(positions + first + at, position, mask=here)


def place_slots(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    block_table: Tensor,
    block_size: int,
    slots_T: Tensor,
    longest: int,
) -> None:
    """As the twin. No row has more than `longest` tokens."""
    block = BLOCK if longest > 1 else 1
    _place_slots[rows_R.shape[0], triton.cdiv(longest, block)](
        rows_R,
        starts_R,
        query_starts,
        block_table,
        block_table.stride(0),
        slots_T,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=1,
    )


@triton.jit
def _place_slots(rows, starts, query_starts, table, row_stride, slots, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    row, start = tl.load(rows + r).to(tl.int64), tl.load(starts + r).to(tl.int64)
    first, end = tl.load(query_starts + r), tl.load(query_starts + r + 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < end - first
    position = start + at
    block = tl.load(table + row * row_stride + position // BLOCK_SIZE, mask=here & (row >= 0), other=0).to(tl.int64)
    slot = tl.where(row >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots + first + at, slot, mask=here)


def correct_starts(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    places_R: Tensor,
    lengths: Tensor,
    context_lens_R: Tensor,
    shifts: Tensor,
) -> None:
    """As the twin."""
    _correct_starts[(rows_R.shape[0],)](
        rows_R, starts_R, query_starts, places_R, lengths, lengths.stride(0), context_lens_R, shifts, num_warps=1
    )


@triton.jit
def _correct_starts(rows, starts, query_starts, places, lengths, length_stride, context_lens, shifts):
    r = tl.program_id(0)
    row, start = tl.load(rows + r).to(tl.int64), tl.load(starts + r)
    if row >= 0:
        last = tl.load(lengths + row * length_stride) - 1
        true_start = tl.minimum(start, last + tl.load(places + r))
        tl.store(shifts + row, start - true_start)
        tl.store(starts + r, true_start)
        tl.store(context_lens + r, true_start + tl.load(query_starts + r + 1) - tl.load(query_starts + r))


def place_samples(sample_at_S: Tensor, positions_T: Tensor, sample_positions_S: Tensor) -> None:
    """As the twin."""
    count = sample_at_S.shape[0]
    _place_samples[(triton.cdiv(count, BLOCK),)](
        sample_at_S, positions_T, sample_positions_S, count, BLOCK=BLOCK, num_warps=1
    )


@triton.jit
def _place_samples(sample_at, positions, sample_positions, count, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(sample_at + s, mask=s < count, other=0)
    position = tl.load(positions + at, mask=s < count, other=0)
    tl.store(sample_positions + s, (position + 1).to(tl.int32), mask=s < count)


def accept(
    first_samples: Tensor,
    sample_at_S: Tensor,
    sample_rows_S: Tensor,
    sample_positions_S: Tensor,
    chosen_S: Tensor,
    token_ids_T: Tensor,
    lengths: Tensor,
    num_accepted_R: Tensor,
) -> None:
    """As the twin."""
    _accept[(num_accepted_R.shape[0],)](
        first_samples,
        sample_at_S,
        sample_rows_S,
        sample_positions_S,
        chosen_S,
        token_ids_T,
        lengths,
        lengths.stride(0),
        num_accepted_R,
        num_warps=1,
    )


@triton.jit
def _accept(
    first_samples, sample_at, sample_rows, sample_positions, chosen, token_ids, lengths, length_stride, num_accepted
):
    r = tl.program_id(0)
    first, end = tl.load(first_samples + r), tl.load(first_samples + r + 1)
    accepted, is_right = 0, 1
    for sample in range(first, end - 1):
        draft = tl.load(token_ids + tl.load(sample_at + sample) + 1)
        is_right = is_right & (tl.load(chosen + sample) == draft).to(tl.int32)
        accepted += is_right
    tl.store(num_accepted + r, accepted)
    row = tl.load(sample_rows + first).to(tl.int64)
    if row >= 0:
        tl.store(lengths + row * length_stride, tl.load(sample_positions + first) + 1 + accepted)
