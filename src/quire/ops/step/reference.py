"""How a step begins on a device, in plain torch: updates of the persistent batch, then token ids, positions and slots.

The oracle of `ops/step/triton.py`. Knows arrays and offsets; nothing of requests.

Shape letters: R rows of the step, T its tokens, S its samples, N segments of a message.
"""

from torch import Tensor


def scatter_segments(words: Tensor, segments_N3: Tensor, payload: Tensor, longest: int) -> None:
    """`words[to : to + length] = payload[from : from + length]` for each (to, from, length) of `segments_N3`.

    Words and payload are int32, segments int64.
    """
    for to, start, length in segments_N3.tolist():
        words[to : to + length] = payload[start : start + length]


def place_tokens(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    token_ids_T: Tensor,
    positions_T: Tensor,
    longest: int,
) -> None:
    """Row r of the step computes tokens `starts_R[r]`… of batch row `rows_R[r]`, as step tokens `query_starts[r]`… .

    A negative row is padding: its tokens get id and position 0.
    """
    bounds = query_starts.tolist()
    for r, (row, start) in enumerate(zip(rows_R.tolist(), starts_R.tolist())):
        first, end = bounds[r], bounds[r + 1]
        positions_T[first:end] = _positions(row, start, end - first, positions_T)
        token_ids_T[first:end] = tokens[row, start : start + end - first] if row >= 0 else 0


def place_slots(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    block_table: Tensor,
    block_size: int,
    slots_T: Tensor,
    longest: int,
) -> None:
    """The slot of each of the step's tokens; -1 for padding."""
    bounds = query_starts.tolist()
    for r, (row, start) in enumerate(zip(rows_R.tolist(), starts_R.tolist())):
        first, end = bounds[r], bounds[r + 1]
        positions = _positions(row, start, end - first, slots_T)
        places = block_table[row, positions // block_size].to(slots_T.dtype) * block_size + positions % block_size
        slots_T[first:end] = places if row >= 0 else -1


def correct_starts(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    places_R: Tensor,
    lengths: Tensor,
    context_lens_R: Tensor,
    shifts: Tensor,
) -> None:
    """Moves starts that are too large back to the row's last token, or so many places after it.

    They can be, because the host did not know how many drafts were accepted. The row's context becomes shorter by as
    much, which is its shift. `lengths` and `shifts` have an entry for each row of the batch.
    """
    bounds = query_starts.tolist()
    for r, row in enumerate(rows_R.tolist()):
        if row >= 0:
            start = min(int(starts_R[r]), int(lengths[row]) - 1 + int(places_R[r]))
            shifts[row] = starts_R[r] - start
            starts_R[r] = start
            context_lens_R[r] = start + bounds[r + 1] - bounds[r]


def place_samples(sample_at_S: Tensor, positions_T: Tensor, sample_positions_S: Tensor) -> None:
    """The positions of the tokens that are chosen at step tokens `sample_at_S`: the next ones."""
    sample_positions_S.copy_(positions_T[sample_at_S.long()] + 1)


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
    """How many drafts of each row, from the first on, equal what was chosen in their place; and the row's new length.

    The length counts the accepted drafts and the token chosen after them. Row r has samples `first_samples[r]` to
    `first_samples[r + 1]`, the first at its last known token.
    """
    bounds = first_samples.tolist()
    for r, first in enumerate(bounds[:-1]):
        num_accepted, num_drafts = 0, bounds[r + 1] - first - 1
        while num_accepted < num_drafts:
            sample = first + num_accepted
            if chosen_S[sample] != token_ids_T[sample_at_S[sample] + 1]:
                break
            num_accepted += 1
        num_accepted_R[r] = num_accepted
        if sample_rows_S[first] >= 0:
            lengths[sample_rows_S[first]] = sample_positions_S[first] + 1 + num_accepted


def _positions(row: int, start: int, count: int, like: Tensor) -> Tensor:
    return like.new_tensor(range(start, start + count) if row >= 0 else [0] * count)
