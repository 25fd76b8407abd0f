"""The persistent batch: one row per running request, with its tokens, block tables and sampling parameters.

Owned by the runner. The core assigns rows; here they are arrays on the device that exist as long as the engine, so that
a step sends only what is new. A sampled token is appended on the device, before the core has seen it.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kv.specs import Group
from quire.sampling.rows import FLOATS, INTS, SamplingRows, Table
from quire.step import RowStart, StepPlan
from quire.worker.words import RowWords


class Batch:
    def __init__(
        self,
        num_rows: int,
        max_len: int,
        groups: tuple[Group, ...],
        vocab_size: int,
        device: torch.device,
        scatter_segments: Callable[..., None] | None,
    ) -> None:
        table_names = [f"table {group_idx}" for group_idx in range(len(groups))]
        table_widths = {name: -(-max_len // group.block_size) for name, group in zip(table_names, groups)}
        # In words of 32 bits: an int64 is two.
        widths = {"ints": 2 * len(INTS), "floats": len(FLOATS), "length": 1, "tokens": max_len, **table_widths}
        self.words = RowWords(num_rows, widths, device, scatter_segments)
        parts = self.words.parts
        self.tokens: Tensor = parts["tokens"]
        self.lengths: Tensor = parts["length"][:, 0]  # tokens of each row, drafts not counted
        self.tables: list[Tensor] = [parts[name] for name in table_names]
        table = Table(parts["floats"].view(torch.float32), parts["ints"].view(torch.int64), self._write_record)
        self.sampling = SamplingRows(vocab_size, table)
        self.table_names = table_names
        self.table_lens = {name: [0] * num_rows for name in table_names}
        self.prompt_lens = [0] * num_rows
        # Row -> how many logprobs of each prompt token it wants, and of how many positions they were delivered before.
        self.prompt_logprobs: dict[int, tuple[int, int]] = {}

    def update(self, plan: StepPlan) -> None:
        """Writes a plan's new rows, new blocks, forced tokens and drafts."""
        for start in plan.new_rows:
            self._start(start)
        for forced in plan.forced:
            self._put_tokens(forced.row, forced.start, forced.token_ids)
        for drafts in plan.drafts:
            self.words.put("tokens", drafts.row, drafts.start, np.array(drafts.token_ids, np.int32))
        for row, new_blocks in zip(plan.rows, plan.new_blocks):
            for (name, lens), blocks in zip(self.table_lens.items(), new_blocks):
                if blocks:
                    self.words.put(name, row, lens[row], np.array(blocks, np.int32))
                    lens[row] += len(blocks)
        self.words.send()

    def owes_prompt_logprobs(self, plan: StepPlan) -> bool:
        """Whether the step computes prompt tokens of rows that want their logprobs."""
        asking = self.prompt_logprobs
        if not asking:
            return False
        return any(row in asking and start < self.prompt_lens[row] - 1 for row, start in zip(plan.rows, plan.starts))

    def _start(self, start: RowStart) -> None:
        row = start.row
        self._put_tokens(row, 0, start.token_ids)
        self.prompt_lens[row] = start.num_prompt_tokens
        for lens in self.table_lens.values():
            lens[row] = 0
        self.sampling.start(start)
        self.prompt_logprobs.pop(row, None)
        if start.params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = (start.params.prompt_logprobs, start.num_prompt_logprobs)

    def _put_tokens(self, row: int, at: int, token_ids: list[int]) -> None:
        self.words.put("tokens", row, at, np.array(token_ids, np.int32))
        self.words.put("length", row, 0, np.array([at + len(token_ids)], np.int32))

    def _write_record(self, row: int, floats: list[float], ints: list[int]) -> None:
        self.words.put("ints", row, 0, np.array(ints, np.int64).view(np.int32))
        self.words.put("floats", row, 0, np.array(floats, np.float32).view(np.int32))
