"""What changes logits before a token is chosen: one pure function per sampling parameter.

Called by `sampler.py`, in the order below. Each works in place on contiguous float32 logits (`restrict` returns
candidates instead) and knows only tensors: which rows use a parameter is the caller's business. Logits hold no NaN and no +inf.

Letters: R rows, V vocabulary, L positions of the token history, N flat entries of all rows, K candidates.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.sampling import row_topk
from quire.ops.ref.vocab import row_sum_exp

FORBIDDEN = -torch.inf
# Candidates looked at per row: enough for nearly all settings in use; rows that need more take a wider look.
WIDTHS = (64, 128, 512, 4096)
TOP_P_WIDTH = 128  # where top_p begins if nothing else restricts it


def allowed_token_ids(logits_RV: Tensor, row_M: Tensor, row_N: Tensor, ids_N: Tensor) -> None:
    """Forbids everything but the ids named for each of the rows `row_M`."""
    kept_N = logits_RV[row_N, ids_N]
    logits_RV.index_fill_(0, row_M, FORBIDDEN)
    logits_RV[row_N, ids_N] = kept_N


def logit_bias(logits_RV: Tensor, row_N: Tensor, ids_N: Tensor, bias_N: Tensor) -> None:
    logits_RV.index_put_((row_N, ids_N), bias_N, accumulate=True)


def history_tail(tokens: Tensor, lengths: Tensor, rows_R: Tensor, width: int) -> Tensor:
    """The last `width` tokens of each row's history, [R, width]; -2 in front of a shorter one."""
    at_RL = lengths[rows_R][:, None] - width + torch.arange(width, device=rows_R.device)
    return tokens[rows_R[:, None], at_RL.clamp(min=0)].masked_fill(at_RL < 0, -2)


def bad_words(logits_RV: Tensor, row_N: Tensor, beginning_NL: Tensor, last_N: Tensor, tail_RL: Tensor) -> None:
    """Forbids a word's last token where the history ends with the word's other tokens (-1: no token)."""
    match_N = ((beginning_NL == tail_RL[row_N]) | (beginning_NL == -1)).all(-1)
    forbid(logits_RV, row_N, last_N, match_N)


def min_tokens(logits_RV: Tensor, row_N: Tensor, ids_N: Tensor, too_short_R: Tensor) -> None:
    """Forbids the ids that would end a row that has not yet its least number of output tokens."""
    forbid(logits_RV, row_N, ids_N, too_short_R[row_N])


def forbid(logits_RV: Tensor, row_N: Tensor, ids_N: Tensor, when_N: Tensor) -> None:
    # Added and not assigned: an id may occur twice in a row, once with and once without its condition.
    penalty_N = torch.zeros_like(when_N, dtype=logits_RV.dtype).masked_fill_(when_N, FORBIDDEN)
    logits_RV.index_put_((row_N, ids_N), penalty_N, accumulate=True)


def penalties(
    logits_RV: Tensor,
    row_P: Tensor,
    history_PL: Tensor,
    length_P: Tensor,
    num_prompt_P: Tensor,
    repetition_P: Tensor,
    presence_P: Tensor,
    frequency_P: Tensor,
) -> None:
    """Repetition over the whole history (> 0: divided, else multiplied), then presence and frequency over the output.

    Costs O(L), not O(V): the logits of the history's tokens are taken out, their places serve to count, and they are put
    back. A token that occurs twice is written twice, with the same value. The history's ids must lie in the vocabulary.
    """
    place_L = torch.arange(history_PL.shape[1], device=history_PL.device)
    is_history_PL = place_L < length_P[:, None]
    is_output_PL = is_history_PL & (place_L >= num_prompt_P[:, None])
    # Beyond its length a row repeats its first token, which is there anyway.
    ids_PL = torch.where(is_history_PL, history_PL, history_PL[:, :1])
    at_N = (ids_PL + row_P[:, None] * logits_RV.shape[1]).flatten()
    flat = logits_RV.view(-1)
    score_PL = flat[at_N].view_as(ids_PL)

    flat.scatter_(0, at_N, 0.0).scatter_add_(0, at_N, is_output_PL.flatten().to(flat.dtype))
    count_PL = flat[at_N].view_as(ids_PL)

    repetition_P1 = repetition_P[:, None]
    score_PL = torch.where(score_PL > 0, score_PL / repetition_P1, score_PL * repetition_P1)
    score_PL -= count_PL * frequency_P[:, None] + (count_PL > 0) * presence_P[:, None]
    flat.scatter_(0, at_N, score_PL.flatten())


def temperature(logits_RV: Tensor, temperature_R: Tensor) -> None:
    logits_RV.div_(temperature_R[:, None])


class Candidates(NamedTuple):
    """The tokens that remain of some rows of a step, most likely first; -inf marks entries that are none."""

    rows: Tensor  # [R]
    logits: Tensor  # [R, K]
    ids: Tensor  # [R, K]


def restrict(logits_RV: Tensor, min_p_R: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Iterator[Candidates]:
    """min_p, then top_k, then top_p; 0, 0 and 1 leave one out. Each row is in one of the groups yielded.

    min_p: tokens of at least this share of the largest probability. top_k: those no less than the k-th largest, so its
    equals remain too. top_p: the smallest set whose mass, among what remained so far, is at least top_p; of equal tokens
    the lower ids come first (transformers leaves that open).
    """
    vocab_size = logits_RV.shape[1]
    top_k_R = top_k_R.masked_fill((top_k_R <= 0) | (top_k_R > vocab_size), vocab_size)
    has_top_k_R = top_k_R < vocab_size
    only_top_p_R = ~has_top_k_R & (min_p_R == 0) & (top_p_R < 1)
    mass_R = _whole_mass(logits_RV, only_top_p_R)
    least_width_R = torch.where(has_top_k_R, top_k_R + 1, only_top_p_R * TOP_P_WIDTH)
    pending_R = torch.arange(len(logits_RV), device=logits_RV.device)
    for width in (*(w for w in WIDTHS if w < vocab_size), vocab_size):
        now_R = pending_R if width == vocab_size else pending_R[least_width_R[pending_R] <= width]
        if len(now_R) == 0:
            continue
        logits_NV = logits_RV if len(now_R) == len(logits_RV) else logits_RV[now_R]
        values_NK, ids_NK = row_topk(logits_NV, width)
        kept_NK, done_N = _kept(values_NK, min_p_R[now_R], top_k_R[now_R], top_p_R[now_R], mass_R[now_R])
        if width == vocab_size:
            done_N = torch.ones_like(done_N)
        yield Candidates(now_R[done_N], values_NK.masked_fill_(~kept_NK, FORBIDDEN)[done_N], ids_NK[done_N])
        pending_R = pending_R[~torch.isin(pending_R, now_R[done_N])]


def _whole_mass(logits_RV: Tensor, wanted_R: Tensor) -> Tensor:
    """sum(exp(logit - largest)) of the wanted rows, inf for the others."""
    mass_R = torch.full(wanted_R.shape, torch.inf, dtype=torch.float64, device=logits_RV.device)
    if bool(wanted_R.any()):
        logits_NV = logits_RV if bool(wanted_R.all()) else logits_RV[wanted_R]
        mass_R[wanted_R] = row_sum_exp(logits_NV, logits_NV.amax(-1))
    return mass_R


def _kept(
    values_RK: Tensor, min_p_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, mass_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Which of the K largest logits remain, and whether nothing that remains can be missing from them.

    `mass_R` is the mass of the whole row if top_p is the row's only restriction, else inf.
    """
    width = values_RK.shape[1]
    largest_R1, last_R1 = values_RK[:, :1], values_RK[:, -1:]
    kth_R1 = values_RK.gather(1, top_k_R[:, None].clamp(max=width) - 1)
    kth_R1 = kth_R1.masked_fill(top_k_R[:, None] > width, -torch.inf)
    floor_R1 = torch.maximum(kth_R1, largest_R1 + min_p_R[:, None].log())
    kept_RK = values_RK >= floor_R1
    seen_R1 = (floor_R1 > last_R1) | (last_R1 == -torch.inf)  # every token of the row not below the floor is here

    exp_RK = (values_RK - largest_R1).double().exp().masked_fill(~kept_RK, 0.0)
    mass_R1 = torch.where(seen_R1, exp_RK.sum(-1, keepdim=True), mass_R[:, None])
    before_RK = exp_RK.cumsum(-1) - exp_RK
    top_p_R1 = top_p_R[:, None].double()
    kept_RK &= (before_RK < top_p_R1 * mass_R1) | (top_p_R1 >= 1.0)
    least_R1 = values_RK.masked_fill(~kept_RK, torch.inf).amin(-1, keepdim=True)
    return kept_RK, (seen_R1 | (least_R1 > last_R1))[:, 0]
