"""An executor without a model, for tests: its output depends on what it reads through the block tables.

Its caches hold the tokens themselves, an entry for every `tokens_per_entry` of them; states hold a hash of all tokens
so far. The next token of a row is a hash of its whole history READ BACK through the block tables of every group, so
that a wrong slot, a block reused too early, a stale token or a wrong state changes the output. A step runs only when
its result is asked for, in order, as on a device that is behind the host.
"""

import hashlib
from collections import deque
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kv.groups import num_blocks_for
from quire.kv.pool import NULL_BLOCK
from quire.kv.specs import CacheSpec, Full, Group, KVLayout
from quire.step import NOTHING, TOKEN, VECTOR, Masks, Move, StepPlan, StepResult

VOCAB_SIZE = 1000
EMPTY = -1  # in place of a token that is not what it should be


def next_token(history: Sequence[int], seed: int, choice_idx: int, allowed: Sequence[int] = range(VOCAB_SIZE)) -> int:
    """The token that the fake model chooses after `history`."""
    digest = hashlib.sha256(repr((list(history), seed, choice_idx)).encode()).digest()
    return allowed[int.from_bytes(digest[:4], "little") % len(allowed)]


def hidden_state(history: Sequence[int]) -> list[float]:
    """The fake model's hidden state after `history`."""
    digest = hashlib.sha256(repr(list(history)).encode()).digest()
    return [byte / 256 for byte in digest[:8]]


def next_state(state: bytes, token_id: int) -> bytes:
    """The state after one more token, as a recurrent layer would have it."""
    return hashlib.sha256(state + token_id.to_bytes(4, "little")).digest()


def allowed_tokens(words: bytes) -> list[int]:
    return [token_id for token_id in range(VOCAB_SIZE) if words[token_id // 8] >> token_id % 8 & 1]


class FakeExecutor(Executor):
    def __init__(self, config: EngineConfig, specs: dict[str, CacheSpec] | None = None) -> None:
        self.specs = specs or {"layer:kv": Full(num_kv_heads=1, head_size=1, dtype="bfloat16")}
        self.num_rows = config.scheduler.max_num_seqs
        self.queue: deque[_FakeStep] = deque()
        self.rows: dict[int, _Row] = {}

    def kv_specs(self) -> dict[str, CacheSpec]:
        return self.specs

    def num_blocks(self, layout: KVLayout) -> list[int]:
        return num_blocks_for(layout, 1 << 20, self.num_rows)

    def allocate(self, layout: KVLayout) -> None:
        self.groups = layout.groups
        # A block holds one group's entries at a time; its old content stays until it is overwritten.
        self.blocks: list[list[dict]] = [[{} for _ in range(pool.num_blocks)] for pool in layout.pools]
        self.outside: list[list[dict]] = [[{} for _ in range(pool.num_places)] for pool in layout.pools]

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
            width = len(masks.words) // len(masks.places)
            for i, place in enumerate(masks.places):
                allowed[place] = allowed_tokens(masks.words[i * width : (i + 1) * width])
        for move in plan.moves:
            self._move(move)
        for start in plan.new_rows:
            self.rows[start.row] = _Row(start.token_ids, start.seed, start.choice_idx, len(self.groups))
        for forced in plan.forced:
            self.rows[forced.row].token_ids[forced.start :] = forced.token_ids
        for drafts in plan.drafts:
            assert drafts.start == len(self.rows[drafts.row].token_ids)
            self.rows[drafts.row].drafts = drafts.token_ids
        tokens: list[list[int]] = []
        vectors: dict[int, list[float]] = {}
        for idx, row in enumerate(plan.rows):
            first, count, produces = plan.starts[idx], plan.num_tokens[idx], plan.produces[idx]
            state = self.rows[row]
            for table, blocks in zip(state.tables, plan.new_blocks[idx]):
                table.extend(blocks)
            place = sum(map(abs, plan.produces[:idx]))
            if produces == VECTOR:
                vectors[len(tokens)] = self._vector(state, first, count)
                tokens.append([])
                continue
            choices = [allowed.get(place + i, range(VOCAB_SIZE)) for i in range(produces)]
            tokens.append(self._compute(state, first, count, produces, choices))
        return StepResult(plan.step_id, tokens, vectors=vectors)

    def _vector(self, state: "_Row", first: int, count: int) -> list[float]:
        self._compute(state, first, count, NOTHING, ())
        return hidden_state(self._read(state, first + count))

    def _compute(
        self, state: "_Row", first: int, count: int, produces: int, choices: Sequence[Sequence[int]]
    ) -> list[int]:
        """A row's part in a step; the tokens it produces, each chosen from those allowed in its place."""
        num_known = len(state.token_ids)
        first = min(first, num_known - 1)  # the core may not know how many drafts were accepted
        drafts = state.drafts[: produces - TOKEN] if produces else []
        state.token_ids += drafts
        for group_idx, group in enumerate(self.groups):
            write = self._write_state if group.spec.is_state else self._write_entries
            write(state, group_idx, group, first, first + count)
        if not produces:
            return []
        chosen: list[int] = []
        for length, allowed in enumerate(choices, num_known):
            chosen.append(self._choose(state, length, allowed))
            if chosen[-1:] != state.token_ids[length : length + 1]:
                break  # no draft there, or a wrong one
        state.token_ids[num_known:] = chosen
        state.drafts = self.draft(state)
        return chosen

    def draft(self, state: "_Row") -> list[int]:
        """`num_drafts` guesses of what follows a row's tokens."""
        return []

    def _move(self, move: Move) -> None:
        blocks, outside = self.blocks[move.pool_idx], self.outside[move.pool_idx]
        if move.is_load:
            blocks[move.block] = dict(outside[move.place])
        else:
            outside[move.place] = dict(blocks[move.block])

    def _write_entries(self, state: "_Row", group_idx: int, group: Group, first: int, end: int) -> None:
        """Entries whose last token is computed in this step."""
        tokens, blocks = group.spec.tokens_per_entry, self.blocks[group.pool_idx]
        for entry in range(first // tokens, end // tokens):
            block = blocks[state.tables[group_idx][entry * tokens // group.block_size]]
            content = tuple(state.token_ids[entry * tokens : (entry + 1) * tokens])
            offset = entry % (group.block_size // tokens)
            for other in range(len(self.groups)):  # the bytes are the same, whichever group wrote them
                block.pop((other, offset), None)
            block[group_idx, offset] = content

    def _write_state(self, state: "_Row", group_idx: int, group: Group, first: int, end: int) -> None:
        """Continues the state of the step before; writes it after the last token and at the end of each block."""
        table = state.tables[group_idx]
        blocks = self.blocks[group.pool_idx]
        size = group.block_size
        value = blocks[table[(first - 1) // size]].get("state", b"") if first else b""
        for position in range(first, end):
            value = next_state(value, state.token_ids[position])
            is_written = (position + 1) % size == 0 or position + 1 == end
            block = table[position // size]
            if is_written and block != NULL_BLOCK:
                blocks[block]["state"] = value

    def _choose(self, state: "_Row", length: int, allowed: Sequence[int]) -> int:
        return next_token(self._read(state, length), state.seed, state.choice_idx, allowed)

    def _read(self, state: "_Row", length: int) -> list[int]:
        """A row's first tokens, as the caches have them."""
        history = state.token_ids[:length]
        for group_idx, group in enumerate(self.groups):
            read = self._read_state if group.spec.is_state else self._read_entries
            read(state, group_idx, group, history)
        return history

    def _read_entries(self, state: "_Row", group_idx: int, group: Group, history: list[int]) -> None:
        tokens = group.spec.tokens_per_entry
        table = state.tables[group_idx]
        blocks = self.blocks[group.pool_idx]
        first = group.spec.first_needed(len(history) - 1)
        for entry in range(-(-first // tokens), len(history) // tokens):
            block = blocks[table[entry * tokens // group.block_size]]
            content = block.get((group_idx, entry % (group.block_size // tokens)), (EMPTY,) * tokens)
            history[entry * tokens : (entry + 1) * tokens] = content

    def _read_state(self, state: "_Row", group_idx: int, group: Group, history: list[int]) -> None:
        block = state.tables[group_idx][(len(history) - 1) // group.block_size]
        if self.blocks[group.pool_idx][block].get("state") != state.true_state(history):
            history[0] = EMPTY


class _Row:
    def __init__(self, token_ids: list[int], seed: int, choice_idx: int, num_groups: int) -> None:
        self.token_ids = list(token_ids)
        self.seed = seed
        self.choice_idx = choice_idx
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.drafts: list[int] = []

    @staticmethod
    def true_state(history: Sequence[int]) -> bytes:
        value = b""
        for token_id in history:
            value = next_state(value, token_id)
        return value


class _FakeStep:
    def __init__(self, executor: FakeExecutor, plan: StepPlan) -> None:
        self.executor = executor
        self.plan = plan
        self.masks: Masks | None = None
        self.done: StepResult | None = None

    def result(self) -> StepResult:
        self.executor.run_until(self)
        return self.done
