"""The contract of those who guess the next tokens of a request in the core, from its tokens alone.

Held by the core's requests, asked by the scheduler when all tokens of the request have arrived. The worker verifies the
guesses as it does those of its own drafter (`base.py`). Knows no torch.
"""

from typing import Protocol


class Proposer(Protocol):
    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow all those of the request, to which each call may bring more."""
        ...

    def finish(self, token_ids: list[int]) -> None:
        """The request has ended, with these tokens."""
        ...
