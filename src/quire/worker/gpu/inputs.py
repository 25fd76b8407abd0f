"""A step's inputs: one array of words, written on the host, copied once, read by every kernel of the step where it always lies.

Filled by the runner from a plan. What it holds for a step of R rows is padded to a shape, so that a graph recorded for that shape
can be replayed: padding rows are -1, padding work has no queries.
"""

import dataclasses
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from quire.kv.specs import Group
from quire.layers.attention import CacheLayer
from quire.ops import fresh
from quire.ops.attention import AttentionWork, max_split_units, max_units, plan_units
from quire.ops.launch import num_multiprocessors
from quire.ops.transfer import to_device
from quire.step import StepPlan

NO_ROW = -1
UNIT_WORDS = 8


@dataclass(frozen=True)
class Shape:
    """How large a step is, padding included: all that a recorded graph depends on."""

    num_rows: int
    num_tokens: int
    num_samples: int
    num_decodes: int  # rows with one token, at most
    num_prefills: int  # rows with several, at most, but those of `fresh`
    fresh: tuple[tuple[int, int], ...] = ()  # (first token, tokens) of long prompts that begin in this step
    wants_all: bool = False  # hidden states of all tokens, not only of those that choose a next one

    @property
    def decode(self) -> bool:
        """Every row has one token."""
        return self.num_prefills == 0 and not self.fresh


class GroupWork:
    """The attention work of one KV group and kind of row: how it is cut into units, and the room its launches share."""

    def __init__(self, layer: CacheLayer, like: Tensor, max_tokens: int, max_rows: int, *, decode: bool) -> None:
        tile, K, G, size = layer.work_shape(like.dtype, decode=decode)
        num_programs = tile.programs_per_multiprocessor * num_multiprocessors(like)
        self.geometry = dict(tile_m=tile.tile_m, group_size=G, num_kv_heads=K, num_programs=num_programs)
        self.window = layer.window
        self.max_units = self.num_units(max_tokens, max_rows)
        num_split = max_split_units(self.max_units, num_kv_heads=K, num_programs=num_programs)
        self.room = AttentionWork.of(like.new_empty(0, dtype=torch.int32), tile, num_split, K, size)

    def num_units(self, num_tokens: int, num_rows: int) -> int:
        """No step of so many tokens in so many rows has more."""
        return max_units(num_tokens, num_rows, **self.geometry)

    def plan(self, starts: np.ndarray, counts: np.ndarray, context_lens: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return plan_units(starts, counts, context_lens, rows, window=self.window, **self.geometry)


class StepInputs:
    """The array's parts by name: on the device as attributes, on the host in `host`."""

    rows: Tensor
    starts: Tensor
    context_lens: Tensor  # starts and the step's own tokens; 0 for padding
    query_starts: Tensor
    sample_at: Tensor  # which of the step's tokens choose a next one
    sample_rows: Tensor  # of the batch
    sample_positions: Tensor  # where the next ones go

    def __init__(self, model: nn.Module, groups: tuple[Group, ...], num_rows: int, max_tokens: int, like: Tensor) -> None:
        """`like`: any tensor of the model's dtype and device."""
        self.groups, device = groups, like.device
        # Rows that decode and rows that compute prompts want different tiles: two lists per group, two launches.
        layers = [model.get_submodule(group.layers[0]) for group in groups]
        self.works = [
            (GroupWork(layer, like, num_rows, num_rows, decode=True), GroupWork(layer, like, max_tokens, num_rows, decode=False))
            for layer in layers
        ]
        self.reads_work = [getattr(layer.backend, "READS_WORK", True) for layer in layers]
        self.recordable = all(getattr(layer.backend, "RECORDABLE", True) for layer in layers)
        cached = [module for module in model.modules() if isinstance(module, CacheLayer)]
        can_be_fresh = all(self.reads_work) and all(
            layer.is_plain and fresh.supports(like, layer.head_size, layer.value_size) for layer in cached
        )
        self.fresh_from = fresh.MIN_TOKENS if can_be_fresh else max_tokens + 1
        sizes = {
            "rows": num_rows + 1,  # one more than requests: the padding's tokens are a row of their own
            "starts": num_rows + 1,
            "context_lens": num_rows + 1,
            "query_starts": num_rows + 2,
            "sample_at": num_rows,
            "sample_rows": num_rows,
            "sample_positions": num_rows,
            **{f"units {idx}": UNIT_WORDS * work.max_units for idx, work in enumerate(chain(*self.works))},
        }
        sizes = {name: -(-size // 4) * 4 for name, size in sizes.items()}  # 16 bytes: kernels are compiled for aligned parts
        ends = np.cumsum(list(sizes.values()))
        self.host_words = np.zeros(ends[-1], np.int32)
        self.words = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)
        self.host = dict(zip(sizes, np.split(self.host_words, ends[:-1])))
        parts = dict(zip(sizes, self.words.split(list(sizes.values()))))
        vars(self).update(parts)
        self.host_units = [self.host[f"units {idx}"].reshape(-1, UNIT_WORDS) for idx in range(2 * len(groups))]
        self.units = [parts[f"units {idx}"].view(-1, UNIT_WORDS) for idx in range(2 * len(groups))]
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slots = [torch.full((max_tokens,), -1, dtype=torch.int64, device=device) for _ in groups]

    def exact_shape(self, plan: StepPlan, wants_all: bool) -> Shape:
        """The step's own, without padding."""
        spans, first = [], 0
        for start, count in zip(plan.starts, plan.num_tokens):
            if start == 0 and count >= self.fresh_from and count % fresh.STEP == 0:
                spans.append((first, count))
            first += count
        num_rows, num_decodes = len(plan.rows), plan.num_tokens.count(1)
        num_prefills = num_rows - num_decodes - len(spans)
        num_samples = max(1, sum(plan.samples))  # kernels want something to do; nobody's row does no harm
        return Shape(num_rows, first, num_samples, num_decodes, num_prefills, tuple(spans), wants_all)

    def fill(self, plan: StepPlan, shape: Shape) -> None:
        """The plan, padded to `shape`, on its way to the device."""
        host = self.host
        rows, starts, counts = (np.array(part, np.int32) for part in (plan.rows, plan.starts, plan.num_tokens))
        num_rows, ends = len(rows), np.cumsum(counts, dtype=np.int32)
        _pad(host["rows"], rows, shape.num_rows, NO_ROW)
        _pad(host["starts"], starts, shape.num_rows, 0)
        _pad(host["context_lens"], starts + counts, shape.num_rows, 0)
        query_starts = host["query_starts"]
        query_starts[1 : num_rows + 1] = ends
        # What is left of the shape's tokens goes to the padding rows: one each, or all to the first.
        left = slice(num_rows + 1, shape.num_rows + 1)
        query_starts[left] = np.arange(left.start, left.stop) if shape.decode else shape.num_tokens
        which = np.flatnonzero(np.array(plan.samples, bool))
        # To the very end: a graph that samples may be larger than the one before it.
        _pad(host["sample_at"], ends[which] - 1, None, 0)
        _pad(host["sample_rows"], rows[which], None, NO_ROW)
        _pad(host["sample_positions"], (starts + counts)[which], None, 0)
        columns = np.stack((ends - counts, counts, starts + counts, rows))
        prefills = counts > 1
        if shape.fresh:
            prefills &= ~np.isin(ends - counts, [first for first, _ in shape.fresh])
        parts = columns[:, counts == 1], columns[:, prefills]
        for idx, work in enumerate(chain(*self.works)):
            part, host_units = parts[idx % 2], self.host_units[idx]
            units = work.plan(*part) if part.shape[1] else host_units[:0]
            _pad(host_units, units, self._num_units(work, idx % 2 == 0, shape), 0)
        to_device(self.host_words, self.words.device, self.words)

    def work(self, group_idx: int, shape: Shape) -> tuple[AttentionWork, ...]:
        """The launches of a group's attention."""
        launches = []
        for idx, work in enumerate(self.works[group_idx]):
            if count := self._num_units(work, idx == 0, shape):
                launches.append(dataclasses.replace(work.room, units=self.units[2 * group_idx + idx][:count]))
        return tuple(launches)

    @staticmethod
    def _num_units(work: GroupWork, decode: bool, shape: Shape) -> int:
        if decode:
            return work.num_units(shape.num_decodes, shape.num_decodes) if shape.num_decodes else 0
        return work.num_units(shape.num_tokens, shape.num_prefills) if shape.num_prefills else 0


def decode_shape(num_rows: int) -> Shape:
    return Shape(num_rows, num_rows, num_rows, num_decodes=num_rows, num_prefills=0)


def mixed_shape(num_rows: int, num_tokens: int) -> Shape:
    """Any step of up to that many requests and tokens."""
    return Shape(num_rows + 1, num_tokens, num_rows, num_decodes=num_rows, num_prefills=num_rows)


def _pad(to: np.ndarray, values: np.ndarray, size: int | None, padding: int) -> None:
    to[: len(values)] = values
    to[len(values) : size] = padding
