"""A predicted answer: as long as the answer follows it, its next tokens are guessed.

For OpenAI's `prediction`: a file that is to come back with a few changes. Where the answer leaves the prediction,
nothing is guessed until its last two tokens are found there again.
"""

import bisect
from itertools import pairwise


class Prediction:
    def __init__(self, predicted: list[int], num_prompt_tokens: int) -> None:
        self.predicted = predicted
        self.num_seen = num_prompt_tokens  # tokens of the request that it has looked at
        self.at = 0  # in the prediction, the token after the last one that the answer has in common with it
        self.follows = True  # the last token of the answer was the one predicted
        self.after_pair: dict[tuple[int, int], list[int]] = {}  # two tokens -> where they end in the prediction
        for end, pair in enumerate(pairwise(predicted), 2):
            self.after_pair.setdefault(pair, []).append(end)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        for length in range(self.num_seen + 1, len(token_ids) + 1):
            self._see(token_ids, length)
        self.num_seen = len(token_ids)
        return self.predicted[self.at : self.at + most] if self.follows else []

    def finish(self, token_ids: list[int]) -> None:
        pass

    def _see(self, token_ids: list[int], length: int) -> None:
        """The last of the first `length` tokens is new."""
        if self.follows and self.predicted[self.at : self.at + 1] == [token_ids[length - 1]]:
            self.at += 1
            return
        ends = self.after_pair.get((token_ids[length - 2], token_ids[length - 1]), []) if length > 1 else []
        self.follows = bool(ends)
        if ends:  # the one nearest to where the answer left, behind it if there is one
            self.at = ends[min(bisect.bisect_right(ends, self.at), len(ends) - 1)]
