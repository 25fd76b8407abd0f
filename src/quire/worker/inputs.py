"""A step's inputs: one array of words, written on the host and copied once, at a fixed address on the device.

Filled by the runner from a plan. The inputs are padded to a shape, so that a recording of that shape can be replayed:
padding rows are -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layers.attention.base import AttentionBackend, DeviceStep, HostStep, Limits, StepShape
from quire.ops.attention import cudnn
from quire.step import TOKEN, StepPlan
from quire.worker.words import Words

NO_ROW = -1


class StepInputs:
    """Each name below is a part of the array on the device; the same part on the host is in `host`."""

    rows: Tensor  # of the persistent batch
    starts: Tensor  # position of each row's first token
    places: Tensor  # how far that is after the last token that was chosen; 0, but for drafts that are rows of their own
    context_lens: Tensor  # tokens of each row, those of the step included; 0 for padding
    query_starts: Tensor  # index of each row's first token among the step's tokens
    sample_at: Tensor  # indices of the step's tokens after which a token is chosen
    sample_rows: Tensor  # rows of the batch, for each sample
    sample_positions: Tensor  # positions of the chosen tokens
    first_samples: Tensor  # index of the first sample of each row that has any; the rest is the number of samples

    def __init__(
        self, backends: list[AttentionBackend], tables: list[Tensor], limits: Limits, shifts: Tensor | None
    ) -> None:
        """`tables`: block tables of the persistent batch, one for each of `backends`. `shifts`: see DeviceStep."""
        num_samples = limits.num_samples
        max_tokens, device = limits.max_tokens, limits.hidden_like.device
        self.backends = backends
        skips_cache = all(backend.skips_cache for backend in backends)
        self.min_uncached_tokens = cudnn.MIN_TOKENS if skips_cache else max_tokens + 1
        own_sizes = {
            "rows": num_samples + 1,  # one more than requests, or places of theirs: a row for padding tokens
            "starts": num_samples + 1,
            "places": num_samples + 1,
            "context_lens": num_samples + 1,
            "query_starts": num_samples + 2,
            "sample_at": num_samples,
            "sample_rows": num_samples,
            "sample_positions": num_samples,
            "first_samples": num_samples + 1,
        }
        shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in own_sizes.items()}
        fields = [backend.fields() for backend in backends]
        for idx, names in enumerate(fields):
            shapes |= {f"{idx} {name}": shape for name, shape in names.items()}
        self.words = Words(shapes, device)
        self.host = self.words.host
        for name in own_sizes:
            setattr(self, name, self.words.device[name])
        for idx, (backend, names, table) in enumerate(zip(backends, fields, tables)):
            step = DeviceStep(self.rows, self.query_starts, self.context_lens, table, shifts)
            host = {name: self.host[f"{idx} {name}"] for name in names}
            on_device = {name: self.words.device[f"{idx} {name}"] for name in names}
            backend.bind(step, host, on_device)
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slots = [torch.full((max_tokens,), -1, dtype=torch.int64, device=device) for _ in backends]

    def exact_shape(self, plan: StepPlan, wants_all: bool, apart: bool = False) -> StepShape:
        """The step's shape without padding. `apart`: see `fill`."""
        if apart:
            return decode_shape(plan.total_tokens)
        uncached = []
        first = 0
        for start, count in zip(plan.starts, plan.num_tokens):
            if start == 0 and count >= self.min_uncached_tokens:
                if count % cudnn.STEP == 0:
                    uncached.append((first, count))
            first += count
        num_rows, num_decodes = len(plan.rows), plan.num_tokens.count(1)
        num_prefills = num_rows - num_decodes - len(uncached)
        num_samples = max(1, plan.num_samples)  # kernels need at least one; a sample without a row has no effect
        return StepShape(num_rows, first, num_samples, num_decodes, num_prefills, tuple(uncached), wants_all)

    def fill(
        self,
        plan: StepPlan,
        shape: StepShape,
        lengths: np.ndarray | None = None,
        apart: bool = False,
        places: Sequence[int] = (),
    ) -> None:
        """Writes the plan, padded to `shape`, and sends it to the device.

        `lengths`: how many tokens each row of the batch has, if the host knows. If not, starts are upper bounds, which
        the device corrects. `apart`: a row's tokens are written as rows of one token each, that read the same blocks;
        all of them choose a token. `places`: how far after its last token each row begins, if the device corrects
        starts; empty: 0.
        """
        host = self.host
        rows = np.array(plan.rows, np.int32)
        starts = np.array(plan.starts, np.int32)
        counts = np.array(plan.num_tokens, np.int32)
        if lengths is not None:
            starts = np.minimum(starts, lengths[rows] - 1)
        place_of = np.array(places, np.int32) if places else np.zeros(len(rows), np.int32)
        if apart:
            firsts = np.cumsum(counts) - counts
            place_of = np.arange(plan.total_tokens, dtype=np.int32) - firsts.repeat(counts)
            starts = starts.repeat(counts) + place_of
            rows, counts = rows.repeat(counts), np.ones(plan.total_tokens, np.int32)
        num_rows = len(rows)
        ends = np.cumsum(counts, dtype=np.int32)
        step = HostStep(rows, ends - counts, counts, starts + counts)
        _pad(host["rows"], rows, shape.num_rows, NO_ROW)
        _pad(host["starts"], starts, shape.num_rows, 0)
        _pad(host["places"], place_of, shape.num_rows, 0)
        _pad(host["context_lens"], step.context_lens, shape.num_rows, 0)
        query_starts = host["query_starts"]
        query_starts[1 : num_rows + 1] = ends
        # Padding tokens belong to the padding rows: one to each, or all to the first.
        unused = slice(num_rows + 1, shape.num_rows + 1)
        query_starts[unused] = np.arange(unused.start, unused.stop) if shape.decode else shape.num_tokens
        if apart:
            self._write_samples(ends - 1, rows, step.context_lens, firsts)
        else:
            self._fill_samples(plan, step, ends)
        for backend in self.backends:
            backend.prepare(step, shape)
        self.words.send()

    def _fill_samples(self, plan: StepPlan, step: HostStep, ends: np.ndarray) -> None:
        """`ends`: the index after the last token of each row, among the step's tokens."""
        sample_at, sample_rows, sample_positions = ends - 1, step.rows, step.context_lens
        first_samples = np.arange(len(ends))
        if plan.produces.count(TOKEN) < len(ends):  # else each row has one sample
            produces = np.array(plan.produces)
            which = np.flatnonzero(produces)  # the row of each sample, as an index into the plan's
            num_each = np.abs(produces[which])
            first_samples = np.cumsum(num_each) - num_each
            which = which.repeat(num_each)
            # How many samples of the same row come after each sample.
            num_after = (first_samples + num_each).repeat(num_each) - 1 - np.arange(len(which))
            sample_at = sample_at[which] - num_after
            sample_rows = np.where(produces[which] > 0, sample_rows[which], NO_ROW)
            sample_positions = sample_positions[which] - num_after
        self._write_samples(sample_at, sample_rows, sample_positions, first_samples)

    def _write_samples(
        self, sample_at: np.ndarray, sample_rows: np.ndarray, sample_positions: np.ndarray, first_samples: np.ndarray
    ) -> None:
        """Padded to the end of the array: the sampling may be recorded for a larger shape than the forward pass."""
        host = self.host
        _pad(host["sample_at"], sample_at, None, 0)
        _pad(host["sample_rows"], sample_rows, None, NO_ROW)
        _pad(host["sample_positions"], sample_positions, None, 0)
        _pad(host["first_samples"], first_samples, None, len(sample_at))


@dataclass(frozen=True)
class SampleShape:
    """What a recorded sampling depends on."""

    num_samples: int
    random: bool
    masked: bool = False  # with masks of grammars


def decode_shape(num_rows: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_rows, num_decodes=num_rows, num_prefills=0)


def mixed_shape(limits: Limits, num_tokens: int) -> StepShape:
    """The shape for any step of up to `num_tokens` tokens."""
    num_rows = limits.num_rows
    return StepShape(num_rows + 1, num_tokens, limits.num_samples, num_decodes=num_rows, num_prefills=num_rows)


def _pad(to: np.ndarray, values: np.ndarray, size: int | None, padding: int) -> None:
    to[: len(values)] = values
    to[len(values) : size] = padding
