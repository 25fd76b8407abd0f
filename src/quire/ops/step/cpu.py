"""How a step begins on a CPU: each token's id, position and slot; twin: `ops/step/reference.py`.

Called by the runner. numpy is quicker than torch with arrays this small. There are no padding rows here.

Shape letters: R rows of the step, T its tokens, S samples.
"""

import numpy as np
from torch import Tensor


def place_tokens(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    token_ids_T: Tensor,
    positions_T: Tensor,
    longest: int,
) -> None:
    """Row r of the step computes tokens `starts_R[r]`… of batch row `rows_R[r]`, as step tokens `query_starts[r]`… ."""
    rows_T, at_T = _rows_and_positions(rows_R, starts_R, query_starts, longest)
    positions_T.numpy()[:] = at_T
    token_ids_T.numpy()[:] = tokens.numpy()[rows_T, at_T]


def place_slots(
    rows_R: Tensor,
    starts_R: Tensor,
    query_starts: Tensor,
    block_table: Tensor,
    block_size: int,
    slots_T: Tensor,
    longest: int,
) -> None:
    """The slot of each of the step's tokens."""
    rows_T, at_T = _rows_and_positions(rows_R, starts_R, query_starts, longest)
    blocks_T, offsets_T = np.divmod(at_T, block_size)
    slots_T.numpy()[:] = block_table.numpy()[rows_T, blocks_T].astype(np.int64) * block_size + offsets_T


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
    bounds = first_samples.numpy()
    at, rows, positions = sample_at_S.numpy(), sample_rows_S.numpy(), sample_positions_S.numpy()
    chosen, token_ids, accepted = chosen_S.numpy(), token_ids_T.numpy(), num_accepted_R.numpy()
    for r in range(len(bounds) - 1):
        samples = range(bounds[r], bounds[r + 1] - 1)
        accepted[r] = next((n for n, s in enumerate(samples) if chosen[s] != token_ids[at[s] + 1]), len(samples))
    is_row = rows[bounds[:-1]] >= 0
    firsts = bounds[:-1][is_row]
    lengths.numpy()[rows[firsts]] = positions[firsts] + 1 + accepted[is_row]


def _rows_and_positions(
    rows_R: Tensor, starts_R: Tensor, query_starts: Tensor, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each of the step's tokens."""
    rows, starts, firsts = rows_R.numpy(), starts_R.numpy(), query_starts.numpy()
    if longest == 1:
        return rows, starts
    counts = np.diff(firsts)
    return rows.repeat(counts), np.arange(firsts[-1]) + (starts - firsts[:-1]).repeat(counts)
