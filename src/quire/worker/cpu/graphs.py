"""Steps in which every row gets one token, played from a tape instead of walked through in Python.

Used by the runner. Everything that varies lies in fixed buffers; one tape, recorded when the engine starts, serves any number of
rows. Where a pass cannot be recorded (plain torch computes part of it) `run` gives None and the runner goes on without.
"""

import logging

import numpy as np
import torch
from torch import Tensor, nn

from quire.kv.specs import Group
from quire.layers.attention import StepContext
from quire.ops.cpu.tape import Recording, Tape
from quire.ops.ref.attention import AttentionTables

log = logging.getLogger(__name__)

MAX_ROWS = 256
RECORDED_ROWS = 2
NO_SLOT = -1


class DecodeGraphs:
    def __init__(self, model: nn.Module, groups: tuple[Group, ...], num_rows: int, max_len: int) -> None:
        self.model = model
        self.groups = groups
        self.max_rows = max(min(MAX_ROWS, num_rows), RECORDED_ROWS)
        self.tape: Tape | None = None
        self.token_ids = np.zeros(self.max_rows, np.int32)
        self.positions = np.zeros(self.max_rows, np.int64)
        self.context_lens = np.ones(self.max_rows, np.int32)
        self.query_starts = np.arange(self.max_rows + 1, dtype=np.int32)
        self.slots = [np.full(self.max_rows, NO_SLOT, np.int64) for _ in groups]
        self.tables = [np.zeros((self.max_rows, -(-max_len // g.block_size)), np.int32) for g in groups]

    def run(
        self, token_ids: np.ndarray, positions: np.ndarray, slots: list[np.ndarray], tables: list[np.ndarray]
    ) -> Tensor | None:
        """Final hidden states of rows that each compute the token at `positions`; None where there is no tape to be had."""
        count = len(token_ids)
        if self.tape is None or count > self.max_rows:
            return None
        self.token_ids[:count] = token_ids
        self.positions[:count] = positions
        self.context_lens[:count] = positions + 1
        for mine, theirs in zip(self.slots, slots):
            mine[:count] = theirs
        for mine, theirs in zip(self.tables, tables):
            mine[:count, : theirs.shape[1]] = theirs
        return self.tape.play(count)

    @torch.inference_mode()
    def record(self) -> None:
        """With the buffers as they are made: rows that look at token 0 of block 0, which is nobody's, and write nowhere."""
        rows = RECORDED_ROWS
        self._fill_context(self.model.context, rows)
        inputs = torch.from_numpy(self.token_ids[:rows]), torch.from_numpy(self.positions[:rows])
        self.model(*inputs)  # methods make at first use what they keep
        with Recording() as recording:
            hidden = self.model(*inputs)
        self.tape = recording.tape(hidden, self.max_rows)
        if self.tape is None:
            log.debug("steps cannot be recorded: torch computes a part of them")

    def _fill_context(self, context: StepContext, rows: int) -> None:
        starts, lens = torch.from_numpy(self.query_starts[: rows + 1]), torch.from_numpy(self.context_lens[:rows])
        context.slots_T[:] = [torch.from_numpy(slots[:rows]) for slots in self.slots]
        context.tables[:] = [
            AttentionTables(starts, lens, torch.from_numpy(table[:rows]), group.block_size, 1, int(self.context_lens[:rows].max()))
            for group, table in zip(self.groups, self.tables)
        ]
