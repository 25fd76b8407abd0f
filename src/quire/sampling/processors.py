"""Edits of logits that name tokens: one pure function per sampling parameter.

Called by `sampler.py`, in the order below. Each works in place on float32 logits and knows only tensors: the caller
decides which samples use a parameter.

Letters: S samples, V vocabulary, L positions of the token history, N flat entries of all samples, M samples that use a
parameter.
"""

import torch
from torch import Tensor

FORBIDDEN = -torch.inf


def allowed_token_ids(logits_SV: Tensor, place_M: Tensor, place_N: Tensor, ids_N: Tensor) -> None:
    """Forbids everything but the ids named for each of the samples at `place_M`."""
    kept_N = logits_SV[place_N, ids_N]
    logits_SV.index_fill_(0, place_M, FORBIDDEN)
    logits_SV[place_N, ids_N] = kept_N


def logit_bias(logits_SV: Tensor, place_N: Tensor, ids_N: Tensor, bias_N: Tensor) -> None:
    logits_SV.index_put_((place_N, ids_N), bias_N, accumulate=True)


def history_tail(tokens: Tensor, rows_S: Tensor, lengths_S: Tensor, width: int) -> Tensor:
    """The last `width` tokens of each sample's history, [S, width]; shorter ones are padded with -2 in front."""
    at_SL = lengths_S[:, None] - width + torch.arange(width, device=rows_S.device)
    return tokens[rows_S[:, None], at_SL.clamp(min=0)].masked_fill(at_SL < 0, -2)


def bad_words(logits_SV: Tensor, place_N: Tensor, beginning_NL: Tensor, last_N: Tensor, tail_SL: Tensor) -> None:
    """Forbids a word's last token where the history ends with the word's other tokens (-1: padding)."""
    match_N = ((beginning_NL == tail_SL[place_N]) | (beginning_NL == -1)).all(-1)
    forbid(logits_SV, place_N, last_N, match_N)


def min_tokens(logits_SV: Tensor, place_N: Tensor, ids_N: Tensor, too_short_S: Tensor) -> None:
    """Forbids the ids that would end a request with fewer output tokens than its minimum."""
    forbid(logits_SV, place_N, ids_N, too_short_S[place_N])


def forbid(logits_SV: Tensor, place_N: Tensor, ids_N: Tensor, when_N: Tensor) -> None:
    # Added, not assigned: an id may occur twice for a sample, once with `when_N` true and once with it false.
    penalty_N = torch.zeros_like(when_N, dtype=logits_SV.dtype).masked_fill_(when_N, FORBIDDEN)
    logits_SV.index_put_((place_N, ids_N), penalty_N, accumulate=True)
