"""A small model guesses what the large one will say, one token after the other.

It runs beside the large one, on the same rows, with caches of its own in the same blocks. It draws with the noise that
the large model will draw with (the same seed and position), so that they choose the same token more often. What it
reads is best effort: where its cache has gaps, its guesses are worse, and no token is wrong.

Made by the worker. `TokenRunner` is what it needs of `worker/runner.py`.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.ops.transfer import on_device
from quire.spec.base import NoDrafter
from quire.step import NOTHING, TOKEN, VECTOR, StepPlan


class TokenRunner(Protocol):
    def forward(self, plan: StepPlan, places: Sequence[int] = ()) -> None:
        """Computes the plan's tokens. Rows whose length only the device knows begin so far after their last token."""
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
    def __init__(self, num_drafts: int, cost: float, max_len: int, max_tokens: int) -> None:
        """`cost`: of a guess, in steps. `max_tokens`: of a forward pass."""
        self.num_drafts = num_drafts
        self.cost = cost
        self.num_ahead = num_drafts + 1
        self.max_len = max_len
        self.max_tokens = max_tokens
        self.runner: TokenRunner
        self.plan: StepPlan
        # Of each row, how many tokens before its last one the model has not read, at most.
        self.num_unread: defaultdict[int, int] = defaultdict(int)
        self.drafted: set[int] = set()  # rows that it guessed for in the step before

    def see(self, plan: StepPlan) -> None:
        """Prompts are read at once; what rows choose is read when they want guesses again."""
        self.plan = plan
        new = {start.row for start in plan.new_rows}
        prompts: list[tuple[int, int, int]] = []
        for row, start, count, produces in zip(plan.rows, plan.starts, plan.num_tokens, plan.produces):
            if row in new or count > max(produces, TOKEN):
                prompts.append((row, start, count))
                self.num_unread[row] = 0
            elif row in self.drafted:  # its own guesses it has read, all but the last
                self.num_unread[row] = int(produces > TOKEN)
            else:
                self.num_unread[row] += 1
        self.drafted.clear()
        if prompts:
            self._read(prompts)

    def draft(self, rows_R: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        plan, known = self.plan, self.runner.known_lengths()
        num_drafts: list[int] = []
        wanted: list[tuple[int, int, int]] = []  # row, position of its last token (at most), tokens to be guessed
        room = self.max_tokens
        step = zip(plan.rows, plan.starts, plan.num_tokens, plan.produces, plan.num_wanted)
        for row, start, count, produces, num_wanted in step:
            if produces <= 0:
                continue
            longest = start + count + 1
            length = longest if known is None else int(known[row])
            if produces > TOKEN and length < longest:
                self.num_unread[row] = 0  # one of its guesses was wrong, so that the last one does not count
            held = min(self.max_len, self.runner.num_held(row))
            num = max(0, min(num_wanted, self.num_drafts, held - length))
            if self.num_unread[row] > room:
                num = 0
            if num:
                wanted.append((row, length - 1, num))
                room -= self.num_unread[row]
            num_drafts.append(num)
        unread = [(row, last - self.num_unread[row], self.num_unread[row]) for row, last, _ in wanted]
        if many := [entry for entry in unread if entry[2] > 1]:
            self._read(many, [-count for _, _, count in many])
        # A single one is read together with the last token, as a row that chooses none.
        entries = [(row, start, -1, VECTOR) for row, start, count in unread if count == 1]
        for place in range(max(num_drafts, default=0)):
            entries += [(row, last + place, place, TOKEN) for row, last, num in wanted if num > place]
            self._read_one_each(entries)
            self.runner.guess()
            entries = []
        self.drafted.update(row for row, _, _ in wanted)
        return on_device(num_drafts, rows_R.device).to(torch.int32)

    def _read_one_each(self, tokens: list[tuple[int, int, int, int]]) -> None:
        """A decode step: (row, position, how far that is after the row's last token, what it produces)."""
        rows, starts, places, produces = ([entry[i] for entry in tokens] for i in range(4))
        self.runner.forward(StepPlan(-1, [], rows, starts, [1] * len(rows), produces, []), places)

    def _read(self, tokens: list[tuple[int, int, int]], places: Sequence[int] = ()) -> None:
        """Tokens of rows: (row, position of the first, how many)."""
        rows, starts, counts = (list(values) for values in zip(*tokens))
        self.runner.forward(StepPlan(-1, [], rows, starts, counts, [NOTHING] * len(rows), []), places)
