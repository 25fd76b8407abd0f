"""Drafts that count as right by chance: how fast a model would be with guesses of a given quality.

For measuring with random weights (`--load-format dummy`), whose text means nothing anyway: drafts are whatever lies
behind a row's tokens, and what the model chose is replaced so that it agrees with them as often as was asked for.
"""

import torch
from torch import Tensor

from quire.config.speculation import Speculation
from quire.spec.base import NoDrafter

NUM_NUMBERS = 1 << 16  # random ones, from which positions and rows take theirs
ROW_STRIDE = 7919  # between the numbers of neighbouring rows


class Drafter(NoDrafter):
    def __init__(self, speculation: Speculation, vocab_size: int, device: torch.device) -> None:
        self.num_drafts = speculation.num_tokens
        self.vocab_size = vocab_size
        self.chances = torch.tensor([*speculation.chances, 0.0], device=device)  # of each place; the last has no draft
        numbers = torch.rand(NUM_NUMBERS, generator=torch.Generator().manual_seed(0))
        self.numbers = numbers.to(device)

    def decide(
        self,
        first_samples: Tensor,
        sample_at_S: Tensor,
        rows_S: Tensor,
        positions_S: Tensor,
        chosen_S: Tensor,
        token_ids_T: Tensor,
    ) -> None:
        samples_S = torch.arange(len(rows_S), dtype=first_samples.dtype, device=rows_S.device)
        nth_S = torch.searchsorted(first_samples, samples_S, right=True) - 1  # row of the step
        places_S = (samples_S - first_samples[nth_S]).clamp(max=self.num_drafts)
        numbers_S = self.numbers[(positions_S.long() + rows_S * ROW_STRIDE) % NUM_NUMBERS]
        is_right_S = numbers_S < self.chances[places_S.long()]
        drafts_S = token_ids_T[(sample_at_S.long() + 1).clamp(max=len(token_ids_T) - 1)].to(chosen_S.dtype)
        chosen_S.copy_(torch.where(is_right_S, drafts_S, (drafts_S + 1) % self.vocab_size))
