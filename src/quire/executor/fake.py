"""An executor without a model, for tests: it believes nothing but the block tables.

Its cache holds the tokens themselves, one per slot of every group. The next token of a row is a hash of its whole history
READ BACK through the block tables of every group, so that a wrong slot, a block reused too early or a stale token
changes the output. A step runs only when its result is asked for, in order, as on a device that is behind.
"""

import hashlib
from collections import deque
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kv.specs import Full, KVLayout, KVSpec
from quire.step import Masks, StepPlan, StepResult

VOCAB_SIZE = 1000
EMPTY = -1


def next_token(history: Sequence[int], seed: int, choice_idx: int, allowed: Sequence[int] = range(VOCAB_SIZE)) -> int:
    """What the fake model says after `history`."""
    digest = hashlib.sha256(repr((list(history), seed, choice_idx)).encode()).digest()
    return allowed[int.from_bytes(digest[:4], "little") % len(allowed)]


def allowed_tokens(words: bytes) -> list[int]:
    return [token_id for token_id in range(VOCAB_SIZE) if words[token_id // 8] >> token_id % 8 & 1]


class FakeExecutor(Executor):
    def __init__(self, config: EngineConfig, specs: dict[str, KVSpec] | None = None) -> None:
        self.specs = specs or {"layer": Full(num_kv_heads=1, head_size=1, dtype_bytes=2)}
        self.queue: deque[_FakeStep] = deque()
        self.rows: dict[int, _Row] = {}

    def kv_specs(self) -> dict[str, KVSpec]:
        return self.specs

    def kv_memory_bytes(self) -> int:
        return 1 << 20

    def allocate(self, layout: KVLayout) -> None:
        self.groups = layout.groups
        self.cache = [[[EMPTY] * g.block_size for _ in range(layout.num_blocks)] for g in layout.groups]

    def forward(self, plan: StepPlan) -> None:
        self.queue.append(_FakeStep(self, plan))

    def sample(self, plan: StepPlan, masks: Masks | None = None) -> "_FakeStep":
        self.queue[-1].masks = Masks(masks.places, bytes(masks.words)) if masks is not None else None
        return self.queue[-1]

    def close(self) -> None:
        self.rows.clear()

    def run_until(self, step: "_FakeStep") -> None:
        while step.done is None:
            oldest = self.queue.popleft()
            oldest.done = self._run(oldest.plan, oldest.masks)

    def _run(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        allowed = {}
        if masks is not None:
            words, width = masks.words, len(masks.words) // len(masks.places)
            allowed = {place: allowed_tokens(words[i * width : (i + 1) * width]) for i, place in enumerate(masks.places)}
        for start in plan.new_rows:
            self.rows[start.row] = _Row(start.token_ids, start.seed, start.choice_idx, len(self.groups))
        for told in plan.told:
            self.rows[told.row].token_ids[told.start :] = told.token_ids
        tokens: list[list[int]] = []
        for row, first, count, samples, new in zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, plan.new_blocks):
            state = self.rows[row]
            for table, blocks in zip(state.tables, new):
                table.extend(blocks)
            for position in range(first, first + count):
                self._write(state, position)
            place = sum(map(bool, tokens))
            tokens.append([self._choose(state, first + count, allowed.get(place, range(VOCAB_SIZE)))] if samples else [])
        return StepResult(plan.step_id, tokens)

    def _write(self, state: "_Row", position: int) -> None:
        for group_idx, group in enumerate(self.groups):
            block = state.tables[group_idx][position // group.block_size]
            # A block holds one group's tokens at a time: whoever takes it overwrites it for all.
            for other in self.cache:
                other[block][position % group.block_size] = EMPTY
            self.cache[group_idx][block][position % group.block_size] = state.token_ids[position]

    def _choose(self, state: "_Row", length: int, allowed: Sequence[int]) -> int:
        history = state.token_ids[:length]
        for group_idx, group in enumerate(self.groups):
            first, table, cache = group.spec.first_needed(length - 1), state.tables[group_idx], self.cache[group_idx]
            for position in (p for p in range(length) if p < group.spec.num_sinks or p >= first):
                history[position] = cache[table[position // group.block_size]][position % group.block_size]
        token = next_token(history, state.seed, state.choice_idx, allowed)
        state.token_ids[length:] = [token]
        return token


class _Row:
    def __init__(self, token_ids: list[int], seed: int, choice_idx: int, num_groups: int) -> None:
        self.token_ids = list(token_ids)
        self.seed = seed
        self.choice_idx = choice_idx
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]


class _FakeStep:
    def __init__(self, executor: FakeExecutor, plan: StepPlan) -> None:
        self.executor = executor
        self.plan = plan
        self.masks: Masks | None = None
        self.done: StepResult | None = None

    def result(self) -> StepResult:
        self.executor.run_until(self)
        return self.done


EXECUTOR = FakeExecutor
