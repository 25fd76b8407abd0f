"""sample(): one token per row, as a pure function of logits, parameters, token history, mask, seed, choice and position.

Called by the worker at the end of a step. Keeps no state: the same request gives the same tokens after preemption, restart
or in other company. Must not know requests, schedules or models, and does nothing for parameters that no row uses.

    raw logits ──► logprobs
        └► grammar mask, allowed_token_ids, logit_bias, bad_words, min_tokens, penalties ──► greedy rows: argmax
               └► temperature, min_p, top_k, top_p, noise ──► random rows: argmax

Broken logits harm only their own row: NaN counts as -inf, +inf as a very large number, and a row in which everything is
forbidden takes the argmax of its raw logits.

Letters: R rows of the step, V vocabulary, M masked rows, W words of a packed mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.sampling import gumbel_argmax, mask_logits, row_argmax
from quire.ops.ref.gumbel import gumbel_argmax as gumbel_argmax_of_candidates
from quire.ops.transfer import on_device
from quire.sampling import processors
from quire.sampling.custom import LogitsProcessor
from quire.sampling.logprobs import TokenLogprobs, token_logprobs
from quire.sampling.rows import SamplingRows, entries, users

VERY_LARGE = 1e30  # for +inf; stays finite when divided by the smallest temperature


class RowMasks(NamedTuple):
    """Grammars' masks of some rows of the step."""

    places_M: Tensor  # which rows, int64
    words_MW: Tensor  # int32, a bit per token: may it be chosen?


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs of the rows that asked, in the order of the step's rows."""

    places: list[int]  # which rows of the step
    num_top: list[int]  # how many of `tokens.top_ids` each of them asked for
    tokens: TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleOutput:
    token_ids: Tensor  # [R] int64
    logprobs: RowLogprobs | None = None


def sample(
    logits_RV: Tensor,
    rows: Sequence[int],
    batch: SamplingRows,
    tokens: Tensor,
    lengths: Tensor,
    positions_R: Tensor,
    mask: RowMasks | None = None,
) -> SampleOutput:
    """Chooses a token for each of `rows` (rows of the persistent batch, on the host).

    `tokens` [num_rows, max_len] and `lengths` [num_rows] are the batch's token histories, prompt included; `positions_R`
    (int64) are the places the new tokens will have. Logits are float32, or any float type if
    all rows are greedy; they are scratch afterwards.
    """
    random = users(rows, batch.random)
    asked = users(rows, batch.num_logprobs)
    edited = batch.edits(rows)
    if mask is not None and not edited and not asked and bool((mask.words_MW != 0).any(1).all()):  # nobody needs the raw logits
        mask_logits(logits_RV, *mask)
        mask = None
    edited = edited or mask is not None
    if edited or random:
        logits_RV = logits_RV.float().contiguous()
    top_R, ids_R = _repaired_argmax(logits_RV)
    if not (edited or random or asked):
        return SampleOutput(ids_R)

    raw_ids_R = ids_R
    raw_LV = _take(logits_RV, asked)
    if raw_LV is logits_RV and (edited or random):
        raw_LV = raw_LV.clone()
    if edited:
        edit(logits_RV, rows, batch, tokens, lengths, mask)
        top_R, ids_R = row_argmax(logits_RV)
    if random:
        drawn_N = _draw(_take(logits_RV, random), [rows[i] for i in random], batch, _take(positions_R, random))
        ids_R = ids_R.index_copy(0, torch.tensor(random, device=ids_R.device), drawn_N)
    ids_R = torch.where(top_R == -torch.inf, raw_ids_R, ids_R)
    return SampleOutput(ids_R, _logprobs(raw_LV, _take(ids_R, asked), asked, rows, batch) if asked else None)


def _repaired_argmax(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and argmax of each row, after its NaN and +inf have been replaced in place."""
    top_R, ids_R = row_argmax(logits_RV)
    # On a GPU asking would wait for the device, so it always repairs.
    if logits_RV.is_cuda or not bool(top_R.isfinite().all()):
        very_large = min(VERY_LARGE, torch.finfo(logits_RV.dtype).max)
        logits_RV.nan_to_num_(nan=-torch.inf, posinf=very_large, neginf=-torch.inf)
        top_R, ids_R = row_argmax(logits_RV)
    return top_R, ids_R


def edit(
    logits_RV: Tensor, rows: Sequence[int], batch: SamplingRows, tokens: Tensor, lengths: Tensor, mask: RowMasks | None = None
) -> None:
    """All that comes before the argmax, in place."""
    edit_sparsely(logits_RV, rows, batch, tokens, lengths, mask)
    if places := users(rows, batch.penalized):
        _penalize(logits_RV, places, rows, batch, tokens, lengths)


def edit_sparsely(
    logits_RV: Tensor, rows: Sequence[int], batch: SamplingRows, tokens: Tensor, lengths: Tensor, mask: RowMasks | None = None
) -> None:
    """All that names tokens, in place; penalties come after it."""
    rows_R = on_device(list(rows), logits_RV.device)
    if mask is not None:
        mask_logits(logits_RV, *mask)
    if places := users(rows, batch.allowed):
        row_N, ids_N = entries(rows, batch.allowed)
        processors.allowed_token_ids(logits_RV, on_device(places, logits_RV.device), row_N, ids_N)
    if users(rows, batch.bias):
        row_N, ids_N, bias_N = entries(rows, batch.bias)
        processors.logit_bias(logits_RV, row_N, ids_N, bias_N)
    if users(rows, batch.bad_words):
        row_N, beginning_NL, last_N = entries(rows, batch.bad_words)
        tail_RL = processors.history_tail(tokens, lengths, rows_R, beginning_NL.shape[1])
        processors.bad_words(logits_RV, row_N, beginning_NL, last_N, tail_RL)
    if users(rows, batch.late):
        row_N, ids_N = entries(rows, batch.late)
        too_short_R = lengths[rows_R] - batch.prompt_len[rows_R] < batch.min_tokens[rows_R]
        processors.min_tokens(logits_RV, row_N, ids_N, too_short_R)
    for processor, wanted_by in batch.custom:
        if places := users(rows, wanted_by):
            _apply(processor, logits_RV, places, rows, tokens, lengths)


def _apply(
    processor: LogitsProcessor, logits_RV: Tensor, places: list[int], rows: Sequence[int], tokens: Tensor, lengths: Tensor
) -> None:
    if len(places) == len(rows):
        processor.apply(logits_RV, rows, tokens, lengths)
        return
    places_P = on_device(places, logits_RV.device)
    logits_PV = logits_RV[places_P]
    processor.apply(logits_PV, [rows[i] for i in places], tokens, lengths)
    logits_RV.index_copy_(0, places_P, logits_PV)


def _penalize(
    logits_RV: Tensor, places: list[int], rows: Sequence[int], batch: SamplingRows, tokens: Tensor, lengths: Tensor
) -> None:
    places_P, rows_P = torch.tensor(places), torch.tensor([rows[i] for i in places])
    length_P, prompt_P, repetition_P = lengths[rows_P], batch.prompt_len[rows_P], batch.repetition_penalty[rows_P]
    # Without repetition penalties only the outputs matter.
    start = 0 if bool((repetition_P != 1.0).any()) else int(prompt_P.amin())
    end = int(length_P.amax())
    if start < end:
        processors.penalties(
            logits_RV,
            places_P,
            tokens[rows_P, start:end],
            length_P - start,
            prompt_P - start,
            repetition_P,
            batch.presence_penalty[rows_P],
            batch.frequency_penalty[rows_P],
        )


def _draw(logits_NV: Tensor, rows: Sequence[int], batch: SamplingRows, positions_N: Tensor) -> Tensor:
    """Token ids of rows with a temperature."""
    rows_N = torch.tensor(rows, device=logits_NV.device)
    temperature_N, key = batch.temperature[rows_N], (batch.seed[rows_N], positions_N.long(), batch.choice_idx[rows_N])
    ids_N = torch.empty_like(rows_N)
    plain = [i for i, row in enumerate(rows) if row not in batch.restricted]
    if plain:
        plain_key = (_take(column, plain) for column in (temperature_N, *key))
        ids_N[plain] = gumbel_argmax(_take(logits_NV, plain), *plain_key)
    restricted = users(rows, batch.restricted)
    if restricted:
        place_M = torch.tensor(restricted, device=logits_NV.device)
        rows_M, logits_MV = rows_N[place_M], _take(logits_NV, restricted)
        if users(rows, batch.tempered):
            processors.temperature(logits_MV, temperature_N[place_M])
        limits = batch.min_p[rows_M], batch.top_k[rows_M], batch.top_p[rows_M]
        for group in processors.restrict(logits_MV, *limits):
            at = place_M[group.rows]
            ids_N[at] = gumbel_argmax_of_candidates(group.logits, *(column[at] for column in key), group.ids)
    return ids_N


def _logprobs(
    raw_LV: Tensor, ids_L: Tensor, places: list[int], rows: Sequence[int], batch: SamplingRows
) -> RowLogprobs:
    num_top = [batch.num_logprobs[rows[i]] for i in places]
    return RowLogprobs(places, num_top, token_logprobs(raw_LV, ids_L, max(num_top)))


def _take(x: Tensor, places: list[int]) -> Tensor:
    """The rows at `places`; `x` itself, not a copy, if these are all."""
    return x if len(places) == len(x) else x[places]
