"""Sampler: a token per sample, as a pure function of logits, parameters, history, mask, seed, choice and position.

Called by the runner at the end of a step. Keeps no state between steps: a request gets the same tokens after a
preemption, after a restart, and whatever other requests run with it. Must not know requests, schedules or models, and
does nothing for parameters that no row uses.

    raw logits ──► logprobs
        └► grammar mask, allowed_token_ids, logit_bias, bad_words, min_tokens, operators' processors
               └► the device's `sample`: penalties ──► greedy rows: argmax
                                             └► temperature, min_p, top_k, top_p, noise ──► random rows: argmax

A sample is a row of the persistent batch and a position in it: the token there is chosen, given the history before it.
A row may have several samples in a step, at different positions. Broken logits harm only their own sample: NaN counts
as -inf, +inf as a very large number, and if everything is forbidden the argmax of the raw logits is taken.

Letters: S samples of the step, V vocabulary, M masked samples, W words of a packed mask, L samples whose logprobs are
wanted, N flat entries of all samples, P samples that a processor handles.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.transfer import on_device
from quire.ops.vocab.cpu import repaired_argmax, row_argmax
from quire.sampling import processors
from quire.sampling.logprobs import LogprobColumns, token_logprobs
from quire.sampling.rows import SamplingRows, entries, places_using


class SampleMasks(NamedTuple):
    """Grammars' masks of some samples of the step."""

    places_M: Tensor  # which samples; -1: none
    words_MW: Tensor  # int32, a bit per token: 1 if it may be chosen


class SampleLogprobs(NamedTuple):
    """Logprobs of the samples whose rows asked, in the order of the step."""

    places: list[int]  # indices of these samples
    num_top: list[int]  # how many of `tokens.top_ids` each of them asked for
    tokens: LogprobColumns


class Sampler:
    """Chooses tokens for the rows of one persistent batch, with the kernels of its device."""

    def __init__(
        self,
        sample: Callable[..., None],  # as in `ops/sampling/reference.py`
        mask_logits: Callable[..., None],  # as in `ops/mask/reference.py`
        batch: SamplingRows,
        tokens: Tensor,  # int32 [num_rows, max_len], the rows' histories
        scratch: object = None,  # memory for the use of `sample`
    ) -> None:
        self._sample = sample
        self._mask_logits = mask_logits
        self._scratch = scratch
        self.batch = batch
        self.tokens = tokens

    def choose(self, logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, out_S: Tensor, **stages: bool) -> None:
        """The device's `sample` alone, for rows that need no more. A CUDA graph can record this."""
        columns = self.batch.columns
        self._sample(logits_SV, rows_S, positions_S, columns, self.tokens, out_S, **stages, scratch=self._scratch)

    def sample(
        self,
        logits_SV: Tensor,
        rows: Sequence[int],
        rows_S: Tensor,
        positions_S: Tensor,
        out_S: Tensor,
        masks: SampleMasks | None = None,
    ) -> SampleLogprobs | None:
        """Samples with all parameters of the rows. Tokens go to `out_S` and into the histories, logprobs are returned.

        `rows` are the values of `rows_S`, on the host. The logits may be overwritten. Nothing here waits for a GPU.
        """
        batch = self.batch
        stages = {name: not getattr(batch, name).isdisjoint(rows) for name in ("random", "restricted", "penalized")}
        is_edited = batch.edits_sparsely(rows)
        asked = places_using(rows, batch.num_logprobs)
        if asked:
            asked_L = on_device(asked, logits_SV.device)
            stays_raw = not is_edited and masks is None and not any(stages.values())
            raw_LV = logits_SV if stays_raw and len(asked) == len(rows) else logits_SV[asked_L]
        if is_edited or _may_forbid_all(masks):
            logits_SV = self._edit(logits_SV.float(), rows, rows_S, positions_S, masks)
        elif masks is not None:
            self._mask_logits(logits_SV, *masks)
        self.choose(logits_SV, rows_S, positions_S, out_S, **stages)
        if not asked:
            return None
        num_top = [batch.num_logprobs[rows[place]] for place in asked]
        named_LK = self._named([rows[place] for place in asked], max(num_top))
        return SampleLogprobs(asked, num_top, token_logprobs(raw_LV, out_S[asked_L], max(num_top), named_LK))

    def _named(self, rows: Sequence[int], width: int) -> Tensor | None:
        """The token ids that each row names for its logprobs, -1 where it names none; None if no row does."""
        ids = self.batch.logprob_ids
        if ids.keys().isdisjoint(rows):
            return None
        named = [ids.get(row, []) for row in rows]
        return on_device([[*each, *[-1] * (width - len(each))] for each in named], self.tokens.device)

    def _edit(
        self, logits_SV: Tensor, rows: Sequence[int], rows_S: Tensor, positions_S: Tensor, masks: SampleMasks | None
    ) -> Tensor:
        """Applies masks and sparse edits, in place. If they forbid everything, the most likely token stays allowed."""
        best_S1 = repaired_argmax(logits_SV)[1][:, None]
        if masks is not None:
            self._mask_logits(logits_SV, *masks)
        edit_sparsely(logits_SV, rows, rows_S.long(), positions_S.long(), self.batch, self.tokens)
        kept_S1 = logits_SV.gather(1, best_S1)
        if logits_SV.is_cuda or bool((kept_S1 == -torch.inf).any()):  # else every sample has a token that is allowed
            is_empty_S1 = row_argmax(logits_SV)[0][:, None] == -torch.inf
            logits_SV.scatter_(1, best_S1, kept_S1.masked_fill(is_empty_S1, 0.0))
        return logits_SV


def _may_forbid_all(masks: SampleMasks | None) -> bool:
    """Whether a mask forbids everything. Not asked on a GPU, where it would wait: there such a mask leaves token 0."""
    if masks is None or masks.words_MW.is_cuda:
        return False
    return bool((masks.words_MW == 0).all(1).any())


def edit_sparsely(
    logits_SV: Tensor, rows: Sequence[int], rows_S: Tensor, lengths_S: Tensor, batch: SamplingRows, tokens: Tensor
) -> None:
    """All parameters that name tokens, and operators' processors; in place."""
    if places := places_using(rows, batch.allowed):
        processors.allowed_token_ids(logits_SV, on_device(places, logits_SV.device), *entries(rows, batch.allowed))
    if places_using(rows, batch.bias):
        processors.logit_bias(logits_SV, *entries(rows, batch.bias))
    if places_using(rows, batch.bad_words):
        place_N, beginning_NL, last_N = entries(rows, batch.bad_words)
        tail_SL = processors.history_tail(tokens, rows_S, lengths_S, beginning_NL.shape[1])
        processors.bad_words(logits_SV, place_N, beginning_NL, last_N, tail_SL)
    if places_using(rows, batch.min_tokens_stop_ids):
        too_short_S = lengths_S - batch.columns.prompt_len[rows_S] < batch.min_tokens[rows_S]
        place_N, ids_N = entries(rows, batch.min_tokens_stop_ids)
        processors.min_tokens(logits_SV, place_N, ids_N, too_short_S)
    for processor, wanted_by in batch.custom:
        places = places_using(rows, wanted_by)
        if len(places) == len(rows):
            processor.apply(logits_SV, rows, tokens, lengths_S)
        elif places:
            places_P = on_device(places, logits_SV.device)
            logits_PV = logits_SV[places_P]
            processor.apply(logits_PV, [rows[place] for place in places], tokens, lengths_S[places_P])
            logits_SV.index_copy_(0, places_P, logits_PV)
