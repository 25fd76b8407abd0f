"""SamplingRows: the sampling parameters of each row of the worker's persistent batch.

The worker sets a row when a request takes it; the sampler reads. Knows nothing of logits or steps. Dense parameters are
columns of tensors on the device. Sparse ones (token ids) are in dictionaries by row, whose keys also tell which rows
use them: a stage that no row of a step uses is skipped.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.sampling.reference import SamplerColumns
from quire.ops.transfer import on_device
from quire.params import SamplingParams
from quire.sampling.custom import LogitsProcessor
from quire.step import RowStart

# Names of a row's dense parameters, in the order of its record.
FLOATS = SamplerColumns._fields[:6]
INTS = (*SamplerColumns._fields[6:], "min_tokens")
# A smaller top_p could be 0 in float32, and then no token would be left; this one keeps the most likely token.
MIN_TOP_P = 1e-30


class Table(NamedTuple):
    """The dense parameters, a record per row."""

    floats: Tensor  # float32 [num_rows, FLOATS]
    ints: Tensor  # int64 [num_rows, INTS]
    write: Callable[[int, list[float], list[int]], None]  # (row, floats, ints): sets a row's record


class SamplingRows:
    def __init__(self, vocab_size: int, table: Table) -> None:
        self.vocab_size = vocab_size
        self.table = table
        self.device = table.floats.device
        *ints, self.min_tokens = table.ints.unbind(1)
        self.columns = SamplerColumns(*table.floats.unbind(1), *ints)  # what the device's sampler reads
        # Rows that use a feature; a row in none of these takes the argmax of its logits.
        self.random: set[int] = set()  # temperature > 0; the others are greedy
        self.restricted: set[int] = set()  # random, with top_k, top_p or min_p
        self.penalized: set[int] = set()
        self.num_logprobs: dict[int, int] = {}
        self.logprob_ids: dict[int, list[int]] = {}  # token ids whose logprobs are wanted, not those of the most likely
        self.allowed: dict[int, tuple[Tensor]] = {}  # token ids [N]
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}  # token ids [N], what is added [N]
        # All tokens of each word but the last, [N, L] padded with -1 in front, and the last ids [N].
        self.bad_words: dict[int, tuple[Tensor, Tensor]] = {}
        self.min_tokens_stop_ids: dict[int, tuple[Tensor]] = {}  # token ids [N], forbidden before min_tokens
        self.custom: list[tuple[LogitsProcessor, set[int]]] = []  # operators' own, each with the rows that want it

    def set(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        choice_idx: int = 0,
        prompt_len: int,
        bad_word_ids: Sequence[Sequence[int]] = (),
        stop_ids: Iterable[int] = (),
    ) -> None:
        """`seed`: the frontend draws one if the user gave none; `stop_ids`: all that end the request, EOS included."""
        self._forget(row)
        ints = [seed, choice_idx, params.top_k, prompt_len, params.min_tokens]
        floats = {name: getattr(params, name) for name in FLOATS}
        floats["top_p"] = max(params.top_p, MIN_TOP_P)
        self.table.write(row, list(floats.values()), ints)
        has_top_k = 0 < params.top_k < self.vocab_size
        is_restricted = has_top_k or params.top_p < 1.0 or params.min_p > 0.0
        if not params.greedy:
            self.random.add(row)
            if is_restricted:
                self.restricted.add(row)
        has_penalty = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        if has_penalty:
            self.penalized.add(row)
        if params.logprobs is not None:
            self.num_logprobs[row] = min(params.logprobs, self.vocab_size)
        if params.logprob_token_ids is not None:
            self.logprob_ids[row] = list(filter(self._is_valid, params.logprob_token_ids))
            self.num_logprobs[row] = len(self.logprob_ids[row])
        self._set_sparse(row, params, bad_word_ids, stop_ids)

    def start(self, start: RowStart) -> None:
        """`set`, from a plan's RowStart, and asks the operator's processors whether they want the row."""
        self.set(
            start.row,
            start.params,
            seed=start.seed,
            choice_idx=start.choice_idx,
            prompt_len=start.num_prompt_tokens,
            bad_word_ids=start.bad_words,
            stop_ids=start.stop_ids,
        )
        for processor, wanted_by in self.custom:
            if processor.wants(start.row, start.params, start.token_ids[: start.num_prompt_tokens]):
                wanted_by.add(start.row)

    def _set_sparse(
        self, row: int, params: SamplingParams, bad_word_ids: Sequence[Sequence[int]], stop_ids: Iterable[int]
    ) -> None:
        # Ids outside of the vocabulary are never sampled: they are dropped, so that they cannot harm other rows.
        if params.allowed_token_ids is not None:
            ids = np.unique(np.array(params.allowed_token_ids, np.int64))
            is_valid = (ids >= 0) & (ids < self.vocab_size)
            self.allowed[row] = (self._tensor(ids[is_valid].tolist()),)
        bias = {token_id: float(value) for token_id, value in params.logit_bias.items() if self._is_valid(token_id)}
        if bias:
            self.bias[row] = self._tensor(list(bias)), on_device(list(bias.values()), self.device, np.float32)
        words = [word for word in bad_word_ids if word and self._is_valid(word[-1])]
        if words:
            width = max(map(len, words)) - 1
            beginnings = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
            last_ids = self._tensor([word[-1] for word in words])
            self.bad_words[row] = self._tensor(beginnings).view(len(words), width), last_ids
        valid_stop_ids = sorted({token_id for token_id in stop_ids if self._is_valid(token_id)})
        if params.min_tokens and valid_stop_ids:
            self.min_tokens_stop_ids[row] = (self._tensor(valid_stop_ids),)

    def _forget(self, row: int) -> None:
        for rows in (self.random, self.restricted, self.penalized):
            rows.discard(row)
        for _, wanted_by in self.custom:
            wanted_by.discard(row)
        tables = self.num_logprobs, self.logprob_ids, self.allowed, self.bias, self.bad_words, self.min_tokens_stop_ids
        for table in tables:
            table.pop(row, None)

    def special(self, rows: Sequence[int]) -> bool:
        """Whether any of the rows asks for more than a temperature."""
        tables = (self.restricted, self.penalized, self.num_logprobs.keys())
        return any(table and not table.isdisjoint(rows) for table in tables) or self.edits_sparsely(rows)

    def edits_sparsely(self, rows: Sequence[int]) -> bool:
        """Whether any of the rows names tokens (to allow, favour or forbid), or wants an operator's processor."""
        if any(not wanted_by.isdisjoint(rows) for _, wanted_by in self.custom):
            return True
        return any(
            table and not table.keys().isdisjoint(rows)
            for table in (self.allowed, self.bias, self.bad_words, self.min_tokens_stop_ids)
        )

    def _is_valid(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _tensor(self, values: list) -> Tensor:
        return on_device(values, self.device)


def places_using(rows: Sequence[int], table: Collection[int]) -> list[int]:
    """The indices of a step's samples whose rows are in `table`; `rows` are the rows of all its samples."""
    return [place for place, row in enumerate(rows) if row in table] if table else []


def entries(rows: Sequence[int], table: Mapping[int, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The entries of a step's samples in `table`, as flat columns; the first column tells the sample of each entry.

    `rows` are the rows of all samples of the step.
    """
    places = places_using(rows, table)
    parts = [table[rows[place]] for place in places]
    place_of_entry: list[int] = []
    for place, part in zip(places, parts):
        place_of_entry += [place] * len(part[0])
    place_N = on_device(place_of_entry, parts[0][0].device)
    return place_N, *map(_stack, zip(*parts, strict=True))


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates; matrices are padded to the same width with -1 in front."""
    if parts[0].dim() == 2:
        width = max(part.shape[1] for part in parts)
        parts = [F.pad(part, (width - part.shape[1], 0), value=-1) for part in parts]
    return torch.cat(list(parts))
