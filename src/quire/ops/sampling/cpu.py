"""One token per sample on a CPU, with compiled kernels. Twin: `ops/sampling/reference.py`, which chooses the same ids.

Called by the sampler. Knows logits, columns of parameters and token histories; nothing of requests. Each stage is
computed only for the samples that need it: greedy ones cost an argmax, random ones a draw, and neither sorts the
vocabulary.

Letters: S samples of the step, V vocabulary, L positions of the token history, P penalized samples, N random samples,
R rows of any of these, K candidates.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops.sampling.gumbel import gumbel_argmax as gumbel_argmax_of_candidates
from quire.ops.sampling.gumbel import token_words
from quire.ops.sampling.reference import SamplerColumns
from quire.ops.vocab.cpu import gumbel_argmax, repaired_argmax, row_argmax, row_topk
from quire.ops.vocab.reference import row_sum_exp
from quire.params import MIN_TEMPERATURE

# How many of a row's largest logits are looked at, until they are enough: usually the first or the second width is.
WIDTHS = (64, 128, 512, 4096)
TOP_P_WIDTH = 128  # the first width tried for rows with top_p alone


class Scratch:
    """What draws need to know of each token of the vocabulary, computed once."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.words_V = token_words(vocab_size, device)


def sample(
    logits_SV: Tensor,
    rows_S: Tensor,
    positions_S: Tensor,
    columns: SamplerColumns,
    tokens: Tensor,
    out_S: Tensor,
    *,
    random: bool,
    restricted: bool,
    penalized: bool,
    scratch: Scratch | None = None,
) -> None:
    """As in `ops/sampling/reference.py`; logits may be changed.

    Histories of penalized rows must hold ids of the vocabulary only.
    """
    rows_S, positions_S = rows_S.long(), positions_S.long()
    if random or penalized:
        logits_SV = logits_SV.float().contiguous()
    top_S, raw_ids_S = repaired_argmax(logits_SV)
    ids_S = raw_ids_S
    if penalized:
        penalize(logits_SV, rows_S, positions_S, columns, tokens)
        top_S, ids_S = row_argmax(logits_SV)
    if random:
        at_N = (columns.temperature[rows_S] >= MIN_TEMPERATURE).nonzero()[:, 0]
        words_V = None if scratch is None else scratch.words_V
        drawn_N = _draw(_take(logits_SV, at_N), rows_S[at_N], positions_S[at_N], columns, restricted, words_V)
        ids_S = ids_S.index_copy(0, at_N, drawn_N)
    if penalized:
        ids_S = torch.where(top_S == -torch.inf, raw_ids_S, ids_S)
    ids, rows, positions = ids_S.numpy(), rows_S.numpy(), positions_S.numpy()  # numpy is faster with a few numbers
    out_S.numpy()[:] = np.where(rows < 0, -1, ids)
    fits = (rows >= 0) & (positions < tokens.shape[1])
    tokens.numpy()[rows[fits], positions[fits]] = ids[fits]


def penalize(logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, columns: SamplerColumns, tokens: Tensor) -> None:
    """As `penalties` of the twin, in place.

    Costs O(L), not O(V): the logits of the history's tokens are taken out, their places are used for counting, and the
    penalized logits are put back. A token that occurs twice is written twice, with the same value.
    """
    given = columns.repetition_penalty, columns.presence_penalty, columns.frequency_penalty
    repetition_S, presence_S, frequency_S = (column[rows_S] for column in given)
    is_penalized_S = (repetition_S != 1.0) | (presence_S != 0.0) | (frequency_S != 0.0)
    at_P = is_penalized_S.nonzero()[:, 0]
    if not len(at_P):
        return
    repetition_P1, presence_P1, frequency_P1 = (x_S[at_P, None] for x_S in (repetition_S, presence_S, frequency_S))
    rows_P, length_P1 = rows_S[at_P], positions_S[at_P, None]
    prompt_len_P1 = columns.prompt_len[rows_P, None]
    # Without repetition penalties only the outputs matter.
    start = 0 if bool((repetition_P1 != 1.0).any()) else int(prompt_len_P1.amin())
    end = int(length_P1.amax())
    if start >= end:
        return
    history_PL = tokens[rows_P, start:end]
    place_L = torch.arange(start, end)
    is_history_PL = place_L < length_P1
    is_output_PL = is_history_PL & (place_L >= prompt_len_P1)
    # Beyond its length a row repeats its first token, which is part of the history anyway.
    ids_PL = torch.where(is_history_PL, history_PL, history_PL[:, :1])
    at_PL = (ids_PL + at_P[:, None] * logits_SV.shape[1]).flatten()
    flat = logits_SV.view(-1)
    score_PL = flat[at_PL].view_as(ids_PL)

    flat.scatter_(0, at_PL, 0.0).scatter_add_(0, at_PL, is_output_PL.flatten().to(flat.dtype))
    count_PL = flat[at_PL].view_as(ids_PL)

    score_PL = torch.where(score_PL > 0, score_PL / repetition_P1, score_PL * repetition_P1)
    score_PL -= count_PL * frequency_P1 + (count_PL > 0) * presence_P1
    flat.scatter_(0, at_PL, score_PL.flatten())


def _draw(
    logits_NV: Tensor,
    rows_N: Tensor,
    positions_N: Tensor,
    columns: SamplerColumns,
    restricted: bool,
    words_V: Tensor | None,
) -> Tensor:
    """Token ids of samples with a temperature."""
    temperature_N = columns.temperature[rows_N]
    seeds_N, choices_N = columns.seed[rows_N], columns.choice_idx[rows_N]
    if not restricted:
        return gumbel_argmax(logits_NV, temperature_N, seeds_N, positions_N, choices_N, words_V)
    min_p_N, top_k_N, top_p_N = columns.min_p[rows_N], columns.top_k[rows_N], columns.top_p[rows_N]
    has_top_k_N = (top_k_N > 0) & (top_k_N < logits_NV.shape[1])
    has_limit_N = (min_p_N > 0.0) | (top_p_N < 1.0) | has_top_k_N
    ids_N = torch.empty_like(rows_N)
    if len(free := (~has_limit_N).nonzero()[:, 0]):
        key = seeds_N[free], positions_N[free], choices_N[free]
        ids_N[free] = gumbel_argmax(_take(logits_NV, free), temperature_N[free], *key, words_V)
    if len(limited := has_limit_N.nonzero()[:, 0]):
        logits_RV = _take(logits_NV, limited)
        divide_by_temperature(logits_RV, temperature_N[limited])
        for group in restrict(logits_RV, min_p_N[limited], top_k_N[limited], top_p_N[limited]):
            at = limited[group.rows]
            key = seeds_N[at], positions_N[at], choices_N[at]
            ids_N[at] = gumbel_argmax_of_candidates(group.logits, *key, group.ids)
    return ids_N


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The rows at `places`, which are sorted; `x` itself, not a copy, if these are all."""
    return x if len(places) == len(x) else x[places]


def divide_by_temperature(logits_RV: Tensor, temperature_R: Tensor) -> None:
    if bool((temperature_R != 1.0).any()):
        logits_RV.div_(temperature_R[:, None])


class Candidates(NamedTuple):
    """The tokens that remain of some rows of a step, most likely first; entries with logit -inf are none."""

    rows: Tensor  # [R]
    logits: Tensor  # [R, K]
    ids: Tensor  # [R, K]


def restrict(logits_RV: Tensor, min_p_R: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Iterator[Candidates]:
    """min_p, then top_k, then top_p; the values 0, 0 and 1 mean none. Each row is in one of the groups yielded.

    min_p keeps tokens of at least this share of the largest probability. top_k keeps those no less than the k-th
    largest, so its equals remain too. top_p keeps the smallest set whose mass, among what remained so far, is at least
    top_p; of equal tokens the lower ids come first (transformers does not define that).
    """
    vocab_size = logits_RV.shape[1]
    top_k_R = top_k_R.masked_fill((top_k_R <= 0) | (top_k_R > vocab_size), vocab_size)
    has_top_k_R = top_k_R < vocab_size
    only_top_p_R = ~has_top_k_R & (min_p_R == 0) & (top_p_R < 1)
    mass_R = _whole_mass(logits_RV, only_top_p_R)
    least_width_R = torch.where(has_top_k_R, top_k_R + 1, only_top_p_R * TOP_P_WIDTH)
    pending_R = torch.arange(len(logits_RV), device=logits_RV.device)
    widths = [width for width in WIDTHS if width < vocab_size]
    for width in (*widths, vocab_size):
        now_R = pending_R if width == vocab_size else pending_R[least_width_R[pending_R] <= width]
        if len(now_R) == 0:
            continue
        logits_NV = logits_RV if len(now_R) == len(logits_RV) else logits_RV[now_R]
        values_NK, ids_NK = row_topk(logits_NV, width)
        kept_NK, done_N = _kept(values_NK, min_p_R[now_R], top_k_R[now_R], top_p_R[now_R], mass_R[now_R])
        if width == vocab_size:
            done_N = torch.ones_like(done_N)
        yield Candidates(now_R[done_N], values_NK.masked_fill_(~kept_NK, -torch.inf)[done_N], ids_NK[done_N])
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
    """(which of the K largest logits remain, whether that is certainly all that remains of the row).

    `mass_R` is the mass of the whole row if top_p is the row's only restriction, else inf.
    """
    width = values_RK.shape[1]
    largest_R1, last_R1 = values_RK[:, :1], values_RK[:, -1:]
    kth_R1 = values_RK.gather(1, top_k_R[:, None].clamp(max=width) - 1)
    kth_R1 = kth_R1.masked_fill(top_k_R[:, None] > width, -torch.inf)
    floor_R1 = torch.maximum(kth_R1, largest_R1 + min_p_R[:, None].log())
    kept_RK = values_RK >= floor_R1
    seen_R1 = (floor_R1 > last_R1) | (last_R1 == -torch.inf)  # all tokens of the row that reach the floor are here

    exp_RK = (values_RK - largest_R1).double().exp().masked_fill(~kept_RK, 0.0)
    mass_R1 = torch.where(seen_R1, exp_RK.sum(-1, keepdim=True), mass_R[:, None])
    before_RK = exp_RK.cumsum(-1) - exp_RK
    top_p_R1 = top_p_R[:, None].double()
    kept_RK &= (before_RK < top_p_R1 * mass_R1) | (top_p_R1 >= 1.0)
    least_R1 = values_RK.masked_fill(~kept_RK, torch.inf).amin(-1, keepdim=True)
    return kept_RK, (seen_R1 | (least_R1 > last_R1))[:, 0]
