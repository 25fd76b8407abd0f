"""A model that repeats its prompt, over and over, at no cost: for measuring and testing everything that is not a model.

`--executor echo` answers at once, `--executor echo:50` takes a fiftieth of a second per step. Knows rows, keeps no
cache.
"""

import time

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.kv.specs import CacheSpec, Full, KVLayout
from quire.step import TOKEN, VECTOR, Masks, StepPlan, StepResult

KV_BYTES = 64 << 20  # as if there were so much memory


class EchoExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        self.memory_bytes = config.cache.kv_cache_memory_bytes or KV_BYTES
        pace = config.parallel.executor.partition(":")[2] or "0"
        try:
            steps_per_s = float(pace)
        except ValueError:
            raise ConfigError(f"echo:{pace} is no pace: write --executor echo:50 for fifty steps per second") from None
        self.step_s = 1 / steps_per_s if steps_per_s > 0 else 0.0
        self.next_end = 0.0
        self.prompts: dict[int, tuple[list[int], int]] = {}  # row -> its tokens, how many of them are prompt

    def kv_specs(self) -> dict[str, CacheSpec]:
        return {"echo:kv": Full(num_kv_heads=1, head_size=1, dtype="bfloat16")}

    def num_blocks(self, layout: KVLayout) -> list[int]:
        return [self.memory_bytes // pool.block_bytes for pool in layout.pools]

    def allocate(self, layout: KVLayout) -> None:
        pass

    def forward(self, plan: StepPlan) -> None:
        for start in plan.new_rows:
            self.prompts[start.row] = start.token_ids, start.num_prompt_tokens

    def sample(self, plan: StepPlan, masks: Masks | None = None) -> "_Done":
        self.next_end = max(self.next_end + self.step_s, time.monotonic())
        tokens: list[list[int]] = []
        vectors: dict[int, list[float]] = {}
        for row, start, count, produces in zip(plan.rows, plan.starts, plan.num_tokens, plan.produces):
            token_ids, num_prompt_tokens = self.prompts[row]
            if produces == VECTOR:
                vectors[len(tokens)] = [float(token_id) for token_id in token_ids]
            length = start + count - max(0, produces - TOKEN)  # drafts are not looked at
            tokens.append([token_ids[length % num_prompt_tokens]] if produces > 0 else [])
        step = StepResult(plan.step_id, tokens, vectors=vectors)
        return _Done(step, self.next_end if self.step_s else 0.0)

    def close(self) -> None:
        self.prompts.clear()


class _Done:
    def __init__(self, step: StepResult, end: float) -> None:
        self.step = step
        self.end = end  # time.monotonic()

    def result(self) -> StepResult:
        if (rest := self.end - time.monotonic()) > 0:
            time.sleep(rest)
        return self.step


EXECUTOR = EchoExecutor
