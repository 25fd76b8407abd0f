"""Who guesses the tokens that follow: the contract of every drafter, and the one that guesses none.

Asked by the runner at the end of a step, on the device; the next step verifies the guesses. It must not wait for the device.
"""

from torch import Tensor


class NoDrafter:
    num_drafts = 0  # of each row, always as many

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Writes guesses behind the tokens of some rows: into `tokens[row, lengths[row] : lengths[row] + num_drafts]`, as far as a row
        has room. `lengths` [num_rows] and `tokens` [num_rows, max_len] are those of the persistent batch."""
