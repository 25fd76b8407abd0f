"""Grammar masks in plain torch: the oracle of `ops/mask/triton.py`, and what CPUs without compiled kernels use.

Letters: S rows that choose a token, V vocabulary, M masked rows, W words of 32 tokens.
"""

import torch
from torch import Tensor


def mask_logits(logits_SV: Tensor, places_M: Tensor, words_MW: Tensor) -> None:
    """Forbids, in rows `places_M`, the tokens whose bit is 0; token i is bit i % 32 of int32 word i // 32.

    Masks at place -1 are padding.
    """
    bits_8 = torch.arange(8, dtype=torch.uint8, device=words_MW.device)
    is_allowed_MV = ((words_MW.contiguous().view(torch.uint8)[..., None] >> bits_8) & 1).flatten(1)
    for place, is_allowed_V in zip(places_M.tolist(), is_allowed_MV):
        if place >= 0:
            logits_SV[place].masked_fill_(is_allowed_V[: logits_SV.shape[1]] == 0, -torch.inf)
