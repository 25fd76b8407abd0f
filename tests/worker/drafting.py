"""A drafter that knows the answers: it guesses what followed the last two tokens, and every third time wrongly."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.spec.base import NoDrafter


class BigramDrafter(NoDrafter):
    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, device: str, num_drafts: int = 3) -> None:
        self.num_drafts = num_drafts
        self.vocab_size = vocab_size
        follows = {}  # two tokens as one number -> the next
        for text in texts:
            for before, last, next_id in zip(text, text[1:], text[2:]):
                follows[before * vocab_size + last] = next_id
        pairs, next_ids = zip(*sorted(follows.items()))
        self.pairs = torch.tensor(pairs, device=device)
        self.next_ids = torch.tensor(next_ids, device=device)

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        rows_R = rows_R.long()
        at_R = lengths[rows_R].long()
        before_R, last_R = tokens[rows_R, at_R - 2].long(), tokens[rows_R, at_R - 1].long()
        for _ in range(self.num_drafts):
            pair_R = before_R * self.vocab_size + last_R
            found_R = torch.searchsorted(self.pairs, pair_R).clamp(max=len(self.pairs) - 1)
            guess_R = torch.where(self.pairs[found_R] == pair_R, self.next_ids[found_R], 0)
            guess_R = torch.where(at_R % 3 == 0, (guess_R + 1) % self.vocab_size, guess_R)
            place_R = at_R.clamp(max=tokens.shape[1] - 1)
            tokens[rows_R, place_R] = torch.where(at_R < tokens.shape[1], guess_R.int(), tokens[rows_R, place_R])
            before_R, last_R, at_R = last_R, guess_R, at_R + 1
