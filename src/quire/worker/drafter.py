"""A drafter guesses the next tokens of rows. Here is the contract, and a drafter that guesses none.

Called by the runner at the end of a step; the next step verifies the guesses. It must not wait for the device.
"""

from torch import Tensor


class NoDrafter:
    num_drafts = 0  # how many tokens it guesses for each row, always the same

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Writes guesses after the tokens of these rows: `tokens[row, lengths[row] : lengths[row] + num_drafts]`.

        At the end of a row it writes only as many as fit. `lengths` [num_rows] and `tokens` [num_rows, max_len] are
        those of the persistent batch.
        """
