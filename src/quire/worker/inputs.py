"""A step's inputs: one array of words, written on the host, copied once, read by every kernel of the step where it always lies.

Filled by the runner from a plan. What it holds for a step of R rows is padded to a shape, so that a recording of that shape
can be replayed: padding rows are -1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layers.attention.base import AttentionBackend, DeviceStep, HostStep, Limits, StepShape
from quire.ops.attention import cudnn
from quire.step import StepPlan
from quire.worker.words import Words

NO_ROW = -1


class StepInputs:
    """Each name below is a part of the array, on the device; the host's is in `host`."""

    rows: Tensor
    starts: Tensor
    context_lens: Tensor  # starts and the step's own tokens; 0 for padding
    query_starts: Tensor
    sample_at: Tensor  # which of the step's tokens choose a next one
    sample_rows: Tensor  # of the batch
    sample_positions: Tensor  # where the next ones go
    first_samples: Tensor  # of each row that chooses tokens; then the number of samples, to the very end

    def __init__(
        self, backends: list[AttentionBackend], tables: list[Tensor], limits: Limits, shifts: Tensor | None
    ) -> None:
        """`tables`: the persistent batch's, one for each of `backends`. `shifts`: see DeviceStep."""
        num_rows, num_samples = limits.num_rows, limits.num_samples
        max_tokens, device = limits.max_tokens, limits.hidden_like.device
        self.backends = backends
        skips_cache = all(backend.skips_cache for backend in backends)
        self.min_uncached_tokens = cudnn.MIN_TOKENS if skips_cache else max_tokens + 1
        own = {
            "rows": num_rows + 1,  # one more than requests: the padding's tokens are a row of their own
            "starts": num_rows + 1,
            "context_lens": num_rows + 1,
            "query_starts": num_rows + 2,
            "sample_at": num_samples,
            "sample_rows": num_samples,
            "sample_positions": num_samples,
            "first_samples": num_rows + 1,
        }
        shapes = {name: (size,) for name, size in own.items()}
        fields = [backend.fields() for backend in backends]
        for idx, names in enumerate(fields):
            shapes |= {f"{idx} {name}": shape for name, shape in names.items()}
        self.words = Words(shapes, device)
        self.host = self.words.host
        for name in own:
            setattr(self, name, self.words.device[name])
        for idx, (backend, names, table) in enumerate(zip(backends, fields, tables)):
            step = DeviceStep(self.rows, self.query_starts, self.context_lens, table, shifts)
            host, on_device = (
                {name: parts[f"{idx} {name}"] for name in names} for parts in (self.host, self.words.device)
            )
            backend.bind(step, host, on_device)
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slots = [torch.full((max_tokens,), -1, dtype=torch.int64, device=device) for _ in backends]

    def exact_shape(self, plan: StepPlan, wants_all: bool) -> StepShape:
        """The step's own, without padding."""
        spans, first = [], 0
        for start, count in zip(plan.starts, plan.num_tokens):
            if start == 0 and count >= self.min_uncached_tokens and count % cudnn.STEP == 0:
                spans.append((first, count))
            first += count
        num_rows, num_decodes = len(plan.rows), plan.num_tokens.count(1)
        num_prefills = num_rows - num_decodes - len(spans)
        num_samples = max(1, plan.num_samples)  # kernels want something to do; nobody's row does no harm
        return StepShape(num_rows, first, num_samples, num_decodes, num_prefills, tuple(spans), wants_all)

    def fill(self, plan: StepPlan, shape: StepShape, lengths: np.ndarray | None = None) -> None:
        """The plan, padded to `shape`, on its way to the device. `lengths`: how many tokens each row of the batch has, where the host
        can know that; else the device corrects what is an upper bound here."""
        host = self.host
        rows, starts, counts = (np.array(part, np.int32) for part in (plan.rows, plan.starts, plan.num_tokens))
        if lengths is not None:
            starts = np.minimum(starts, lengths[rows] - 1)
        num_rows, ends = len(rows), np.cumsum(counts, dtype=np.int32)
        step = HostStep(rows, ends - counts, counts, starts + counts)
        _pad(host["rows"], rows, shape.num_rows, NO_ROW)
        _pad(host["starts"], starts, shape.num_rows, 0)
        _pad(host["context_lens"], step.context_lens, shape.num_rows, 0)
        query_starts = host["query_starts"]
        query_starts[1 : num_rows + 1] = ends
        # What is unused of the shape's tokens goes to the padding rows: one each, or all to the first.
        unused = slice(num_rows + 1, shape.num_rows + 1)
        query_starts[unused] = np.arange(unused.start, unused.stop) if shape.decode else shape.num_tokens
        produces = np.array(plan.produces)
        which = np.flatnonzero(produces)
        num_each = np.abs(produces[which])
        first_samples = np.cumsum(num_each) - num_each
        behind = 0  # how many samples of the row come after each
        if len(which) < plan.num_samples:
            which = which.repeat(num_each)
            behind = (first_samples + num_each).repeat(num_each) - 1 - np.arange(plan.num_samples)
        # To the very end: a recording that samples may be larger than the one before it.
        _pad(host["sample_at"], ends[which] - 1 - behind, None, 0)
        _pad(host["sample_rows"], np.where(produces[which] > 0, rows[which], NO_ROW), None, NO_ROW)
        _pad(host["sample_positions"], step.context_lens[which] - behind, None, 0)
        _pad(host["first_samples"], first_samples, None, plan.num_samples)
        for backend in self.backends:
            backend.prepare(step, shape)
        self.words.send()


@dataclass(frozen=True)
class SampleShape:
    """What a recorded sampling depends on."""

    num_samples: int
    random: bool
    masked: bool = False  # grammars have a say


def decode_shape(num_rows: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_rows, num_decodes=num_rows, num_prefills=0)


def mixed_shape(limits: Limits, num_tokens: int) -> StepShape:
    """Any step of up to that many tokens."""
    num_rows = limits.num_rows
    return StepShape(num_rows + 1, num_tokens, limits.num_samples, num_decodes=num_rows, num_prefills=num_rows)


def _pad(to: np.ndarray, values: np.ndarray, size: int | None, padding: int) -> None:
    to[: len(values)] = values
    to[len(values) : size] = padding
