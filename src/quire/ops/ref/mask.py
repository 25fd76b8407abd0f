"""Grammar masks in plain torch: the oracle of `ops/mask.py`, and what CPUs use.

Letters: S rows that choose a token, V vocabulary, M masked rows, W words of 32 tokens.
"""

import functools

import torch
from torch import Tensor


def mask_logits(logits_SV: Tensor, places_M: Tensor, words_MW: Tensor) -> None:
    """Forbids, in rows `places_M`, the tokens whose bit is 0; token i is bit i % 32 of int32 word i // 32. Place -1: nobody's."""
    forbidden_MV = _forbidden(logits_SV.device)[words_MW.contiguous().view(torch.uint8).long()].view(torch.bool)
    for place, forbidden_V in zip(places_M.tolist(), forbidden_MV.view(len(words_MW), -1)):
        if place >= 0:
            logits_SV[place].masked_fill_(forbidden_V[: logits_SV.shape[1]], -torch.inf)


@functools.cache
def _forbidden(device: torch.device) -> Tensor:
    """For each byte its 8 bits as 8 booleans, one int64: true where the bit is 0."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (bits == 0).view(torch.int64)[:, 0].to(device)
