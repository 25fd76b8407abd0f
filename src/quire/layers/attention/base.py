"""How the layers of one KV group attend: the contract of every backend.

A backend is a class, one object of it per group, made by the runner. Before each step it is asked to `prepare` what the host plans,
in words that travel to the device with the step's other inputs; `tables` gives what its layers read there, at addresses that stay,
so that the step can be recorded. It must not know requests or plans.

Shape letters: R rows of the step, T its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.ops.attention.reference import AttentionTables

if TYPE_CHECKING:
    from quire.layers.attention._layer import CacheLayer


@dataclass(frozen=True)
class StepShape:
    """How large a step is, padding included: all that a recording depends on."""

    num_rows: int
    num_tokens: int
    num_samples: int
    num_decodes: int  # rows with one token, at most
    num_prefills: int  # rows with several, at most, but those of `uncached_prefills`
    uncached_prefills: tuple[tuple[int, int], ...] = ()  # (first token, tokens) of long prompts that begin in this step
    wants_all: bool = False  # hidden states of all tokens, not only of those that choose a next one

    @property
    def decode(self) -> bool:
        """Every row has one token."""
        return self.num_prefills == 0 and not self.uncached_prefills

    @property
    def longest(self) -> int:
        """No row has more tokens."""
        return 1 if self.decode else self.num_tokens


@dataclass(frozen=True)
class Limits:
    """Of any step."""

    num_rows: int
    max_tokens: int
    max_len: int
    hidden_like: Tensor  # of the model's dtype and device
    num_drafts: int = 0  # that a row verifies

    @property
    def num_samples(self) -> int:
        return self.num_rows * (1 + self.num_drafts)


@dataclass(frozen=True)
class HostStep:
    """A step's rows on the host, without padding, int32 [R]."""

    rows: np.ndarray  # of the persistent batch
    firsts: np.ndarray  # which of the step's tokens is the row's first
    counts: np.ndarray  # tokens
    context_lens: np.ndarray  # tokens in all, these included


@dataclass(frozen=True)
class DeviceStep:
    """The same where attention reads it, as long as the largest step; padding rows are -1 and have no context."""

    rows: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor  # of the group: [rows of the persistent batch, blocks]
    shifts: Tensor | None  # how many tokens fewer a row of the batch has than was planned; None: none


class AttentionBackend:
    """The simplest: goes by lengths and block tables, plans nothing."""

    is_recordable = True  # the host does nothing between a step's launches
    skips_cache = (
        False  # computes `uncached_prefills` rows, of which nothing is cached yet, from the step's own keys and values
    )

    def __init__(
        self, layers: Sequence["CacheLayer"], block_size: int, limits: Limits, twin: "AttentionBackend | None" = None
    ) -> None:
        """`layers`: all that read the group's cache. `twin`: of a group before it, for layers of the same kind: what is planned
        of a step, all but block tables, is the same there."""
        self.block_size, self.limits, self.twin = block_size, limits, twin

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Words that `prepare` fills, by name, with their shapes."""
        return {}

    def bind(self, step: DeviceStep, host: dict[str, np.ndarray], device: dict[str, Tensor]) -> None:
        """Where steps lie, and these words, on the host and on the device."""
        self.step, self.host, self.device = step, host, device

    def prepare(self, step: HostStep, shape: StepShape) -> None:
        """Plans a step, padded to `shape`."""

    def tables(self, shape: StepShape) -> AttentionTables:
        """What layers read in steps of this shape."""
        rows_R = self.step.rows[: shape.num_rows]
        # Once per step, not in every layer. Padding has no context in whichever row it gets.
        return self._tables(shape, self.step.block_table.index_select(0, rows_R.clamp(min=0)))

    def _tables(self, shape: StepShape, block_table: Tensor, **fields: object) -> AttentionTables:
        return AttentionTables(
            query_starts=self.step.query_starts[: shape.num_rows + 1],
            context_lens=self.step.context_lens[: shape.num_rows],
            block_table=block_table,
            block_size=self.block_size,
            max_query_len=shape.longest,
            uncached_prefills=shape.uncached_prefills,
            **fields,
        )


class CpuBackend(AttentionBackend):
    """Rows' block tables lie side by side in memory that stays, as a tape wants it."""

    def __init__(
        self, layers: Sequence["CacheLayer"], block_size: int, limits: Limits, twin: AttentionBackend | None = None
    ) -> None:
        super().__init__(layers, block_size, limits, twin)
        self.table = np.zeros((max(2, limits.num_rows), -(-limits.max_len // block_size)), np.int32)

    def prepare(self, step: HostStep, shape: StepShape) -> None:
        width = -(-int(step.context_lens.max()) // self.block_size)
        self.table[: len(step.rows), :width] = self.step.block_table.numpy()[step.rows, :width]

    def tables(self, shape: StepShape) -> AttentionTables:
        return self._tables(shape, torch.from_numpy(self.table[: shape.num_rows]))
