"""The persistent batch on a device: every row's tokens, block tables and sampling parameters, in one array of words.

Owned by the runner. Because all of it is one array, whatever a step brings (a prompt, a few block ids, parameters) is a list of
segments: one copy to the device and one kernel, however many rows begin. Sampled tokens are appended on the device itself.
"""

import math

import numpy as np
import torch

from quire.kv.specs import Group
from quire.ops.step import scatter_segments
from quire.ops.transfer import to_device
from quire.sampling.rows import FLOATS, INTS, SamplingRows, Table
from quire.step import RowStart, StepPlan


class Batch:
    def __init__(self, num_rows: int, max_len: int, groups: tuple[Group, ...], vocab_size: int, device: torch.device) -> None:
        table_widths = [-(-max_len // g.block_size) for g in groups]
        record = 2 * len(INTS), len(FLOATS)  # an int64 is two words
        shapes = [(num_rows, width) for width in (record[0], record[1], max_len, *table_widths)]
        sizes = [math.prod(shape) for shape in shapes]
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.offsets = np.cumsum([0, *sizes[:-1]]).tolist()
        ints, floats, self.tokens, *self.tables = (
            part.view(shape) for part, shape in zip(self.words.split(sizes), shapes, strict=True)
        )
        self.widths = [shape[1] for shape in shapes]
        table = Table(floats.view(torch.float32), ints.view(torch.int64), self._write_record)
        self.sampling = SamplingRows(num_rows, vocab_size, table)
        self.table_lens = [[0] * num_rows for _ in groups]
        self.prompt_lens = [0] * num_rows
        self.prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (how many wanted, positions delivered before)
        self._news: list[tuple[int, np.ndarray]] = []  # where in `words`, what

    def update(self, plan: StepPlan) -> None:
        """Takes in new rows, new blocks and tokens that no step chose."""
        for start in plan.new_rows:
            self._start(start)
        for told in plan.told:
            self._put(2, told.row, told.start, np.array(told.token_ids, np.int32))
        for row, new_blocks in zip(plan.rows, plan.new_blocks):
            for group_idx, blocks in enumerate(new_blocks):
                if blocks:
                    lens = self.table_lens[group_idx]
                    self._put(3 + group_idx, row, lens[row], np.array(blocks, np.int32))
                    lens[row] += len(blocks)
        self._send()

    def owes_prompt_logprobs(self, plan: StepPlan) -> bool:
        """Whether the step computes prompt tokens of rows that want their logprobs."""
        asking = self.prompt_logprobs
        return any(row in asking and start < self.prompt_lens[row] - 1 for row, start in zip(plan.rows, plan.starts)) if asking else False

    def _start(self, start: RowStart) -> None:
        row = start.row
        self._put(2, row, 0, np.array(start.token_ids, np.int32))
        self.prompt_lens[row] = start.num_prompt_tokens
        for lens in self.table_lens:
            lens[row] = 0
        self.sampling.start(start)
        self.prompt_logprobs.pop(row, None)
        if start.params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = (start.params.prompt_logprobs, start.num_prompt_logprobs)

    def _write_record(self, row: int, floats: list[float], ints: list[int]) -> None:
        self._put(0, row, 0, np.array(ints, np.int64).view(np.int32))
        self._put(1, row, 0, np.array(floats, np.float32).view(np.int32))

    def _put(self, part: int, row: int, at: int, values: np.ndarray) -> None:
        self._news.append((self.offsets[part] + row * self.widths[part] + at, values))

    def _send(self) -> None:
        if not self._news:
            return
        places, parts = zip(*self._news)
        self._news.clear()
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        segments = np.stack((np.array(places, np.int64), np.cumsum(lengths) - lengths, lengths), 1)
        message = to_device(np.concatenate((segments.view(np.int32).ravel(), *parts)), self.words.device)
        head, payload = message[: 2 * segments.size], message[2 * segments.size :]
        scatter_segments(self.words, head.view(torch.int64).view(-1, 3), payload, int(lengths.max()))


