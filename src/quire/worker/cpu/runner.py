"""Runs a step: from a plan to the model's inputs, through the model, to chosen tokens.

Called by the worker. Two halves, `forward` and `sample`, because some inputs of sampling arrive late. Knows rows and tensors;
not requests, not why a step looks as it does.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from quire.kv.specs import KVLayout
from quire.ops.cpu.sampling import sample
from quire.ops.cpu.vocab import mask_logits
from quire.ops.ref.attention import AttentionTables
from quire.sampling.logprobs import token_logprobs
from quire.sampling.sampler import SampleMasks, Sampler
from quire.step import Masks, StepPlan, StepResult, TokenLogprobs
from quire.worker.cpu.batch import Batch
from quire.worker.cpu.graphs import DecodeGraphs
from quire.worker.logprobs import LOGPROBS_AT_ONCE, entries, prompt_span


@dataclass
class _Launched:
    """What `sample` needs of a forward pass."""

    plan: StepPlan
    hidden_TD: Tensor
    query_starts: np.ndarray


@dataclass(frozen=True)
class Ready:
    """A step that is already done: a CPU computes when told to."""

    done: StepResult

    def result(self) -> StepResult:
        return self.done


class Runner:
    def __init__(self, model: nn.Module, layout: KVLayout, num_rows: int, max_len: int, vocab_size: int) -> None:
        self.model = model
        self.groups = layout.groups
        self.batch = Batch(num_rows, max_len, layout.groups, vocab_size)
        self.sampler = Sampler(sample, mask_logits, self.batch.sampling, self.batch.tokens_tensor)
        self.graphs = DecodeGraphs(model, layout.groups, num_rows, max_len)
        self.launched: _Launched | None = None

    def get_ready(self) -> None:
        self.graphs.record()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        batch = self.batch
        batch.update(plan)
        if not plan.rows:  # empty steps are legal
            self.launched = _Launched(plan, torch.empty(0, 0), np.zeros(1, np.int32))
            return
        rows, starts, counts = np.array(plan.rows), np.array(plan.starts), np.array(plan.num_tokens)
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        one_each = query_starts[-1] == len(rows)
        if one_each:
            token_rows, positions = rows, starts
        else:
            idx = np.repeat(np.arange(len(rows)), counts)
            token_rows = rows[idx]
            positions = np.arange(query_starts[-1]) - query_starts[idx] + starts[idx]
        context_lens = starts + counts
        token_ids = batch.tokens[token_rows, positions]
        slots, tables = self._places(rows, token_rows, positions, int(context_lens.max()))
        hidden_TD = self.graphs.run(token_ids, positions, slots, tables) if one_each else None
        if hidden_TD is None:
            self._fill_context(query_starts, context_lens, slots, tables)
            hidden_TD = self.model(torch.from_numpy(token_ids), torch.from_numpy(positions))
        self.launched = _Launched(plan, hidden_TD, query_starts)

    def _places(
        self, rows: np.ndarray, token_rows: np.ndarray, positions: np.ndarray, max_context_len: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per group: the slot each token is written to, and the block tables of the rows."""
        slots, tables = [], []
        for group, table in zip(self.groups, self.batch.tables):
            size = group.block_size
            slots.append(table[token_rows, positions // size].astype(np.int64) * size + positions % size)
            tables.append(table[rows, : -(-max_context_len // size)])
        return slots, tables

    def _fill_context(
        self, query_starts: np.ndarray, context_lens: np.ndarray, slots: list[np.ndarray], tables: list[np.ndarray]
    ) -> None:
        """What attention layers read in this step."""
        context = self.model.context
        starts, lens = torch.from_numpy(query_starts), torch.from_numpy(context_lens.astype(np.int32))
        longest = int(np.diff(query_starts).max()), int(context_lens.max())
        context.slots_T[:] = map(torch.from_numpy, slots)
        context.tables[:] = [
            AttentionTables(starts, lens, torch.from_numpy(np.ascontiguousarray(table)), group.block_size, *longest)
            for group, table in zip(self.groups, tables)
        ]

    def mask_memory(self, num_rows: int, num_words: int, is_new: bool) -> None:
        return None

    @torch.inference_mode()
    def sample(self, masks: Masks | None = None) -> "Ready":
        """Tokens for the rows of the last forward that ask for one."""
        return Ready(self._sample(masks))

    def _sample(self, masks: Masks | None) -> StepResult:
        launched, self.launched = self.launched, None
        plan = launched.plan
        result = StepResult(plan.step_id, [[] for _ in plan.rows])
        self._prompt_logprobs(launched, result)
        which = np.flatnonzero(np.array(plan.samples, bool))
        if not len(which):
            return result
        last = torch.from_numpy(launched.query_starts[which + 1].astype(np.int64) - 1)
        logits_SV = self.model.logits(launched.hidden_TD[last])
        rows = np.array(plan.rows)[which]
        positions = (np.array(plan.starts) + np.array(plan.num_tokens))[which]  # where the new tokens go
        token_ids = torch.empty(len(rows), dtype=torch.int32)
        samples = torch.from_numpy(rows), torch.from_numpy(positions), token_ids
        row_masks = _sample_masks(masks) if masks is not None else None
        logprobs = self.sampler.sample(logits_SV, rows.tolist(), *samples, row_masks)
        for idx, token_id in zip(which.tolist(), token_ids.tolist()):
            result.token_ids[idx] = [token_id]
        if logprobs is not None:
            places = [int(which[place]) for place in logprobs.places]
            ids = [result.token_ids[idx][0] for idx in places]
            for idx, entry in zip(places, entries(ids, logprobs.tokens, logprobs.num_top)):
                result.logprobs[idx] = [entry]
        return result

    def _prompt_logprobs(self, launched: _Launched, result: StepResult) -> None:
        """For rows that want them: how likely each prompt token was, given those before it."""
        plan, batch = launched.plan, self.batch
        if not batch.prompt_logprobs:
            return
        for idx, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.num_tokens)):
            wanted, delivered = batch.prompt_logprobs.get(row, (None, 0))
            first, last = prompt_span(start, count, delivered, int(batch.prompt_lens[row]))
            if wanted is None or first > last:
                continue
            offset = int(launched.query_starts[idx]) - start
            hidden = launched.hidden_TD[offset + first - 1 : offset + last]
            targets = batch.tokens_tensor[row, first : last + 1].long()
            result.prompt_logprobs[idx] = _logprobs(self.model, hidden, targets, wanted)


def _sample_masks(masks: Masks) -> SampleMasks:
    words = np.frombuffer(masks.words, np.int32).reshape(len(masks.places), -1)
    return SampleMasks(torch.tensor(masks.places), torch.tensor(words))


def _logprobs(model: nn.Module, hidden_TD: Tensor, targets_T: Tensor, k: int) -> list[TokenLogprobs]:
    found: list[TokenLogprobs] = []
    for start in range(0, hidden_TD.shape[0], LOGPROBS_AT_ONCE):
        end = start + LOGPROBS_AT_ONCE
        targets = targets_T[start:end]
        columns = token_logprobs(model.logits(hidden_TD[start:end]), targets, k)
        found += entries(targets.tolist(), columns, [k] * len(targets))
    return found
