"""The persistent batch: one row per running request, holding its tokens, block tables and sampling parameters.

Owned by the runner. The core assigns rows; here they are arrays that live for the engine's life, so that a step sends only what
is new. The tokens are the device's own: a sampled token is appended here before the core has seen it.
"""

import numpy as np
import torch

from quire.kv.specs import Group
from quire.sampling.rows import SamplingRows
from quire.step import RowStart, StepPlan


class Batch:
    def __init__(self, num_rows: int, max_len: int, groups: tuple[Group, ...], vocab_size: int) -> None:
        self.tokens = np.zeros((num_rows, max_len), np.int32)
        self.tokens_tensor = torch.from_numpy(self.tokens)  # the same memory
        self.prompt_lens = np.zeros(num_rows, np.int64)
        self.tables = [np.zeros((num_rows, -(-max_len // g.block_size)), np.int32) for g in groups]
        self.table_lens = [[0] * num_rows for _ in groups]
        self.sampling = SamplingRows(num_rows, vocab_size)
        self.prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (how many wanted, positions delivered before)

    def update(self, plan: StepPlan) -> None:
        """Takes in new rows, new blocks and tokens that no step chose."""
        for start in plan.new_rows:
            self._start(start)
        for told in plan.told:
            self.tokens[told.row, told.start : told.start + len(told.token_ids)] = told.token_ids
        for row, new_blocks in zip(plan.rows, plan.new_blocks):
            for table, lens, blocks in zip(self.tables, self.table_lens, new_blocks):
                if blocks:
                    table[row, lens[row] : lens[row] + len(blocks)] = blocks
                    lens[row] += len(blocks)

    def _start(self, start: RowStart) -> None:
        row = start.row
        self.tokens[row, : len(start.token_ids)] = start.token_ids
        self.prompt_lens[row] = start.num_prompt_tokens
        for lens in self.table_lens:
            lens[row] = 0
        self.sampling.start(start)
        self.prompt_logprobs.pop(row, None)
        if start.params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = (start.params.prompt_logprobs, start.num_prompt_logprobs)
