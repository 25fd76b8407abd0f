"""What begins a step on a device, in plain torch: news into the persistent batch, then each token's id, position and slot.

The oracle of `ops/step.py`. Knows arrays and offsets; nothing of requests.

Shape letters: R rows of the step, T its tokens, N segments of a message.
"""

from torch import Tensor


def scatter_segments(words: Tensor, segments_N3: Tensor, payload: Tensor, longest: int) -> None:
    """For each (to, from, length) of int64 `segments_N3`: `words[to:to + length] = payload[from:from + length]`; both int32."""
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

    A negative row is padding: id and position 0.
    """
    bounds = query_starts.tolist()
    for r, (row, start) in enumerate(zip(rows_R.tolist(), starts_R.tolist())):
        first, end = bounds[r], bounds[r + 1]
        positions_T[first:end] = _positions(row, start, end - first, positions_T)
        token_ids_T[first:end] = tokens[row, start : start + end - first] if row >= 0 else 0


def place_slots(
    rows_R: Tensor, starts_R: Tensor, query_starts: Tensor, block_table: Tensor, block_size: int, slots_T: Tensor, longest: int
) -> None:
    """The slot of each of the step's tokens; -1 for padding."""
    bounds = query_starts.tolist()
    for r, (row, start) in enumerate(zip(rows_R.tolist(), starts_R.tolist())):
        first, end = bounds[r], bounds[r + 1]
        positions = _positions(row, start, end - first, slots_T)
        places = block_table[row, positions // block_size].to(slots_T.dtype) * block_size + positions % block_size
        slots_T[first:end] = places if row >= 0 else -1


def _positions(row: int, start: int, count: int, like: Tensor) -> Tensor:
    return like.new_tensor(range(start, start + count) if row >= 0 else [0] * count)
