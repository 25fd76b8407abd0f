"""One token per sample from logits and columns of parameters, in plain torch.

The oracle of `ops/sampling/triton.py` and `ops/sampling/cpu.py`, called by their tests. Knows tensors only; the sampler
describes what each parameter does. Simple and slow: everything is computed for all samples and the whole vocabulary,
then selected.

Letters: S samples of the step, V vocabulary, L positions of the token history.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.sampling.gumbel import gumbel_argmax
from quire.ops.vocab.reference import row_argmax, row_topk
from quire.params import MIN_TEMPERATURE

VERY_LARGE = 1e30  # in place of +inf; stays finite when divided by the smallest temperature


class SamplerColumns(NamedTuple):
    """The parameters of each row of the persistent batch, [num_rows]; columns of one type have the same stride."""

    temperature: Tensor  # float32, as the next five; below MIN_TEMPERATURE a row is greedy
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    seed: Tensor  # int64, as the next three
    choice_idx: Tensor
    top_k: Tensor
    prompt_len: Tensor


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
    scratch: object = None,
) -> None:
    """Sample s chooses token number `positions_S[s]` of row `rows_S[s]`, from the history `tokens[row, :position]`.

    The token is written to `out_S[s]` and to that position of `tokens`, if it has it. A row may occur several times,
    with different positions: histories are as they were before the call. A negative row is padding and gets -1. The
    flags say whether any row needs the stage; other rows skip it.
    """
    row_S, positions_S = rows_S.long().clamp(min=0), positions_S.long()
    columns = SamplerColumns(*(column[row_S] for column in columns))
    logits_SV = logits_SV.float().nan_to_num(nan=-torch.inf, posinf=VERY_LARGE, neginf=-torch.inf)
    _, raw_ids_S = row_argmax(logits_SV)
    if penalized:
        logits_SV = penalties(logits_SV, tokens[row_S], positions_S, columns)
    top_S, ids_S = row_argmax(logits_SV)
    if random:
        random_S = columns.temperature >= MIN_TEMPERATURE
        logits_SV = logits_SV / torch.where(random_S, columns.temperature, 1.0)[:, None]
        if restricted:
            logits_SV = logits_SV.masked_fill(~kept(logits_SV, columns), -torch.inf)
        drawn_S = gumbel_argmax(logits_SV, columns.seed, positions_S, columns.choice_idx)
        ids_S = torch.where(random_S, drawn_S, ids_S)
    ids_S = torch.where(top_S == -torch.inf, raw_ids_S, ids_S).int()

    out_S.copy_(torch.where(rows_S < 0, -1, ids_S))
    fits_S = (rows_S >= 0) & (positions_S < tokens.shape[1])
    tokens[row_S[fits_S], positions_S[fits_S]] = ids_S[fits_S]


def penalties(logits_SV: Tensor, history_SL: Tensor, length_S: Tensor, columns: SamplerColumns) -> Tensor:
    """Repetition penalty for the whole history, then presence and frequency penalties for the output.

    The repetition penalty divides positive logits and multiplies others.
    """
    place_L = torch.arange(history_SL.shape[1], device=history_SL.device)
    in_history_SL = (place_L < length_S[:, None]) & (history_SL >= 0) & (history_SL < logits_SV.shape[1])
    in_output_SL = in_history_SL & (place_L >= columns.prompt_len[:, None])
    ids_SL = history_SL.long().masked_fill(~in_history_SL, 0)
    seen_SV = torch.zeros_like(logits_SV).scatter_add_(1, ids_SL, in_history_SL.float()) > 0
    count_SV = torch.zeros_like(logits_SV).scatter_add_(1, ids_SL, in_output_SL.float())

    repetition_S1, presence_S1 = columns.repetition_penalty[:, None], columns.presence_penalty[:, None]
    repeated_SV = torch.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    logits_SV = torch.where(seen_SV, repeated_SV, logits_SV)
    return logits_SV - (count_SV * columns.frequency_penalty[:, None] + (count_SV > 0) * presence_S1)


def kept(logits_SV: Tensor, columns: SamplerColumns, extra_mass: float = 0.0) -> Tensor:
    """Which tokens remain after min_p, then top_k, then top_p; of equal tokens at top_p's limit those with lower ids.

    `extra_mass` is added to that limit, as a share of the mass.
    """
    vocab_size = logits_SV.shape[1]
    values_SV, ids_SV = row_topk(logits_SV, vocab_size)
    top_k_S = columns.top_k.masked_fill((columns.top_k <= 0) | (columns.top_k > vocab_size), vocab_size)
    kth_S1 = values_SV.gather(1, top_k_S[:, None] - 1)
    kept_SV = values_SV >= torch.maximum(kth_S1, values_SV[:, :1] + columns.min_p[:, None].log())

    exp_SV = (values_SV - values_SV[:, :1]).double().exp().masked_fill(~kept_SV, 0.0)
    before_SV = exp_SV.cumsum(-1) - exp_SV
    top_p_S1 = columns.top_p[:, None].double()
    limit_S1 = (top_p_S1 + extra_mass) * exp_SV.sum(-1, keepdim=True)
    kept_SV &= (before_SV < limit_S1) | (top_p_S1 >= 1.0)
    return torch.zeros_like(kept_SV).scatter_(1, ids_SV, kept_SV)
