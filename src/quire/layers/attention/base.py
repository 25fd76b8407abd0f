"""How the layers of one KV group attend: the interface of every backend.

A backend is a class; the runner makes one object of it per group. Before each step, `prepare` plans on the host, into
words that are copied to the device with the step's other inputs; `tables` returns what layers read there, at addresses
that stay the same, so that the step can be recorded. A backend must not know requests or step plans.

Shape letters: R rows of the step, T its tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.step import max_samples

if TYPE_CHECKING:
    from quire.layers.attention._layer import CacheLayer


@dataclass(frozen=True)
class StepShape:
    """How large a step is, padding included: all that a recording depends on."""

    num_rows: int
    num_tokens: int
    num_samples: int
    num_decodes: int  # at most so many rows have one token
    num_prefills: int  # at most so many rows have several, those of `uncached_prefills` not counted
    uncached_prefills: tuple[tuple[int, int], ...] = ()  # (first token, tokens) of long prompts that begin in this step
    wants_all: bool = False  # hidden states of all tokens are wanted, not only of those that are sampled from

    @property
    def decode(self) -> bool:
        """Every row has one token."""
        return self.num_prefills == 0 and not self.uncached_prefills

    @property
    def longest(self) -> int:
        """The most tokens that a row can have."""
        return 1 if self.decode else self.num_tokens


@dataclass(frozen=True)
class Limits:
    """The largest step there can be."""

    num_rows: int
    max_tokens: int
    max_len: int
    hidden_like: Tensor  # any tensor of the model's dtype and device
    num_drafts: int = 0  # tokens that a drafter guesses for a row

    @property
    def num_samples(self) -> int:
        return max_samples(self.num_rows, self.num_drafts)


@dataclass(frozen=True)
class HostStep:
    """A step's rows on the host, without padding, int32 [R]."""

    rows: np.ndarray  # which row of the persistent batch it is
    firsts: np.ndarray  # which of the step's tokens is the row's first
    counts: np.ndarray  # tokens of the row in this step
    context_lens: np.ndarray  # tokens of the row in all, this step's included


@dataclass(frozen=True)
class DeviceStep:
    """The same on the device, as long as the largest step; padding rows are -1 and have no context."""

    rows: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor  # of the group: [rows of the persistent batch, blocks]
    shifts: Tensor | None  # by row of the batch: how many tokens fewer it has than was planned; None: all as planned


class AttentionBackend:
    """The simplest backend: its kernels read lengths and block tables, and it plans nothing."""

    is_recordable = True  # the host does nothing between a step's launches
    # Computes rows of `uncached_prefills`, of which nothing is cached yet, from the step's own keys and values.
    skips_cache = False

    # Kernels that subclasses have: the first two for attention, the others for latent attention.
    rope_and_write: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    norm_rope_and_write: Callable[..., None]
    head_linear: Callable[..., Tensor]
    latent_attention: Callable[..., Tensor]

    def __init__(
        self, layers: Sequence["CacheLayer"], block_size: int, limits: Limits, twin: "AttentionBackend | None" = None
    ) -> None:
        """`layers`: all that read the group's cache. `twin`: the backend of an earlier group with layers of the same
        kind: its plan of a step, apart from block tables, is also this group's."""
        self.block_size = block_size
        self.limits = limits
        self.twin = twin

    def fields(self) -> dict[str, tuple[int, ...]]:
        """The words that `prepare` fills: name -> shape."""
        return {}

    def bind(self, step: DeviceStep, host: dict[str, np.ndarray], device: dict[str, Tensor]) -> None:
        """Says where each step, and the words of `fields`, are on the host and on the device."""
        self.step = step
        self.host = host
        self.device = device

    def prepare(self, step: HostStep, shape: StepShape) -> None:
        """Plans a step, padded to `shape`."""

    def tables(self, shape: StepShape) -> AttentionTables:
        """What layers read in steps of this shape."""
        rows_R = self.step.rows[: shape.num_rows]
        # Selected once per step, not in every layer. Padding has no context, so it may get any row.
        return self._tables(shape, self.step.block_table.index_select(0, rows_R.clamp(min=0)))

    def _tables(
        self,
        shape: StepShape,
        block_table: Tensor,
        rows: Tensor | None = None,
        work: tuple | None = None,
        shifts: Tensor | None = None,
    ) -> AttentionTables:
        return AttentionTables(
            query_starts=self.step.query_starts[: shape.num_rows + 1],
            context_lens=self.step.context_lens[: shape.num_rows],
            block_table=block_table,
            block_size=self.block_size,
            max_query_len=shape.longest,
            uncached_prefills=shape.uncached_prefills,
            rows=rows,
            work=work,
            shifts=shifts,
        )


class CpuBackend(AttentionBackend):
    """Copies the rows' block tables into one table at an address that stays the same, which recorded steps need."""

    def __init__(
        self, layers: Sequence["CacheLayer"], block_size: int, limits: Limits, twin: AttentionBackend | None = None
    ) -> None:
        super().__init__(layers, block_size, limits, twin)
        self.table = torch.zeros(max(2, limits.num_samples), -(-limits.max_len // block_size), dtype=torch.int32)

    def prepare(self, step: HostStep, shape: StepShape) -> None:
        width = -(-int(step.context_lens.max()) // self.block_size)
        self.table.numpy()[: len(step.rows), :width] = self.step.block_table.numpy()[step.rows, :width]

    def tables(self, shape: StepShape) -> AttentionTables:
        return self._tables(shape, self.table[: shape.num_rows])
