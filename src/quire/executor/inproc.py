"""One worker in this process: the executor of `LLM` and of single-device servers.

The worker is reached by dotted path, so that importing the core never imports torch.
"""

import importlib

from quire.config import EngineConfig
from quire.executor.base import Executor, PendingStep
from quire.kv.specs import CacheSpec, KVLayout
from quire.step import Masks, StepPlan

WORKER = "quire.worker.worker"


def prepare(num_workers: int) -> None:
    importlib.import_module(WORKER)


class InprocExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        self.worker = importlib.import_module(WORKER).Worker(config)

    @property
    def num_drafts(self) -> int:
        return self.worker.drafter.num_drafts

    @property
    def num_ahead(self) -> int:
        return self.worker.drafter.num_ahead

    @property
    def draft_cost(self) -> float:
        return self.worker.drafter.cost

    @property
    def num_graphs(self) -> int:
        return self.worker.num_graphs

    def kv_specs(self) -> dict[str, CacheSpec]:
        return self.worker.kv_specs()

    def num_blocks(self, layout: KVLayout) -> list[int]:
        return self.worker.num_blocks(layout)

    def allocate(self, layout: KVLayout) -> None:
        self.worker.allocate(layout)

    def forward(self, plan: StepPlan) -> None:
        self.worker.runner.forward(plan)

    def sample(self, plan: StepPlan, masks: Masks | None = None) -> PendingStep:
        return self.worker.runner.sample(masks)

    def mask_memory(self, num_rows: int, num_words: int, is_new: bool) -> memoryview | None:
        return self.worker.runner.masks.memory(num_rows, num_words, is_new)

    def sleep(self, keep_weights: bool) -> None:
        self.worker.sleep(keep_weights)

    def wake_up(self) -> None:
        self.worker.wake_up()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None


EXECUTOR = InprocExecutor
