"""A small model guesses what the large one will say, one token after the other.

It runs beside the large one, on the same rows, with caches of its own in the same blocks. It draws with the noise that
the large model will draw with (the same seed and position), so that they choose the same token more often. What it
reads is best effort: where its cache has gaps, its guesses are worse, and no token is wrong.

Made by the worker. `TokenRunner` is what it needs of `worker/runner.py`.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.ops.transfer import on_device
from quire.spec.base import NoDrafter
from quire.step import NOTHING, TOKEN, StepPlan


class TokenRunner(Protocol):
    def forward(self, plan: StepPlan, place: int = 0) -> None:
        """Computes the plan's tokens. Rows whose length only the device knows begin `place` after their last token."""
        ...

    def guess(self) -> None:
        """Chooses a token for each row of the last forward pass, and writes it behind the row's."""
        ...

    def known_lengths(self) -> np.ndarray | None:
        """Tokens of each row; None: only the device knows."""
        ...

    def num_held(self, row: int) -> int:
        """Tokens for which the row has blocks."""
        ...


class Drafter(NoDrafter):
    def __init__(self, num_drafts: int, max_len: int) -> None:
        self.num_drafts = self.num_ahead = num_drafts
        self.max_len = max_len
        self.runner: TokenRunner
        self.plan: StepPlan

    def see(self, plan: StepPlan) -> None:
        """Reads the prompts of the step, too."""
        self.plan = plan
        new = {start.row for start in plan.new_rows}
        step = zip(plan.rows, plan.starts, plan.num_tokens, plan.produces)
        read = [(row, start, count) for row, start, count, produces in step if row in new or count > max(produces, 1)]
        if read:
            rows, starts, counts = (list(values) for values in zip(*read))
            self.runner.forward(_plan(rows, starts, counts, NOTHING))

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        plan, known = self.plan, self.runner.known_lengths()
        num_drafts: list[int] = []
        wanted: list[tuple[int, int, int]] = []  # row, position of its last token (at most), tokens to be guessed
        unread: list[tuple[int, int]] = []  # row, position: the last of its own guesses, if all were right
        step = zip(plan.rows, plan.starts, plan.num_tokens, plan.produces, plan.num_wanted)
        for row, start, count, produces, num_wanted in step:
            if produces <= 0:
                continue
            longest = start + count + 1
            length = longest if known is None else int(known[row])
            held = min(self.max_len, self.runner.num_held(row))
            num_drafts.append(max(0, min(num_wanted, self.num_drafts, held - length)))
            if num_drafts[-1]:
                wanted.append((row, length - 1, num_drafts[-1]))
                if produces > TOKEN and length == longest:
                    unread.append((row, length - 2))
        if unread:
            self._forward(unread, -1)
        for place in range(max(num_drafts, default=0)):
            self._forward([(row, last + place) for row, last, count in wanted if count > place], place)
            self.runner.guess()
        return on_device(num_drafts, rows_R.device).to(torch.int32)

    def _forward(self, tokens: list[tuple[int, int]], place: int) -> None:
        """One token of each row: (row, position)."""
        rows, starts = (list(values) for values in zip(*tokens))
        self.runner.forward(_plan(rows, starts, [1] * len(rows), TOKEN), place)


def _plan(rows: list[int], starts: list[int], counts: list[int], produces: int) -> StepPlan:
    return StepPlan(-1, [], rows, starts, counts, [produces] * len(rows), [])
