"""Where the end of a text occurred before, with numpy; twin of `triton.py`, and what CPUs use.

Called by `spec/ngram.py`. Knows tensors only.
"""

import numpy as np
import torch
from torch import Tensor


def repeat_continuations(
    rows_R: Tensor, lengths: Tensor, tokens: Tensor, smallest: int, largest: int, num_drafts: int
) -> Tensor:
    """Writes what may follow the tokens of each row behind them; returns how many it wrote, int32 [R].

    The longest end of a row, of `smallest` to `largest` tokens, that also occurs before, counts; of several places the
    latest. What followed there is copied, and goes on with its own copy where it reaches the end of the row.
    """
    counts_R = torch.zeros(len(rows_R), dtype=torch.int32)
    tokens_of = tokens.numpy()
    max_len = tokens.shape[1]
    for r, row in enumerate(rows_R.tolist()):
        length = int(lengths[row])
        text = tokens_of[row]
        place = _find(text[:length], smallest, largest)
        if place is not None:
            count = min(num_drafts, max_len - length)
            period = length - place
            text[length : length + count] = text[place + np.arange(count) % period]
            counts_R[r] = count
    return counts_R


def _find(text: np.ndarray, smallest: int, largest: int) -> int | None:
    """The index of the token that followed."""
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])  # where the last token occurred
    size = 1
    while size < largest and len(ends):
        inside = ends[ends >= size]
        longer = inside[text[inside - size] == text[last - size]] if last >= size else inside[:0]
        if not len(longer):
            break
        ends = longer
        size += 1
    return int(ends[-1]) + 1 if len(ends) and size >= smallest else None
