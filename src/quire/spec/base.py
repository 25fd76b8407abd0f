"""A drafter guesses the next tokens of rows. Here is the contract, and a drafter that guesses none.

Made by the worker; called by its runner at the end of a step. The next step verifies the guesses. It must not wait for
the device.
"""

from torch import Tensor

from quire.step import StepPlan


class NoDrafter:
    num_drafts = 0  # how many tokens it guesses for a row, at most
    cost = 0.0  # of a guess, in steps
    num_ahead = 0  # tokens after those of a step for which rows need blocks, so that it can guess

    def see(self, plan: StepPlan) -> None:
        """A step whose tokens, and those of the steps before, the rows have now."""

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor | None:
        """Writes guesses after the tokens of these rows: `tokens[row, lengths[row] : lengths[row] + num_drafts]`.

        At the end of a row it writes only as many as fit. `lengths` [num_rows] and `tokens` [num_rows, max_len] are
        those of the persistent batch. Returns how many it guessed for each of the rows, int32 [R]; None: always
        `num_drafts`. What it did not write is verified all the same, if the core did not know.
        """
        return None

    def decide(
        self,
        first_samples: Tensor,
        sample_at_S: Tensor,
        rows_S: Tensor,
        positions_S: Tensor,
        chosen_S: Tensor,
        token_ids_T: Tensor,
    ) -> None:
        """Called before drafts are compared with the tokens chosen in their places, which may be replaced here.

        The arguments are those of `accept` in `ops/step/reference.py`.
        """
