"""THE loop: plan, submit, apply.

Owned by whoever runs a core: `LLM` in its own process, `core/process.py` behind a socket. Knows requests and steps,
not text, tensors or clients.
"""

import logging
from types import ModuleType

import msgspec

from quire import registry
from quire.config import EngineConfig
from quire.core.pipeline import Pipeline
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.errors import EngineError
from quire.executor.base import Executor
from quire.kv.groups import check_capacity, form_layout, num_blocks_for
from quire.kv.manager import KVManager
from quire.kv.specs import KVLayout
from quire.messages import Abort, AddRequest, EngineStats, StepOutputs
from quire.utils.flight import NoRecorder

log = logging.getLogger(__name__)


def executor_module(name: str) -> ModuleType:
    """The executor of that name; what follows a colon is for the executor itself."""
    return registry.load("quire.executor", name.partition(":")[0])


class Engine:
    """A core: takes AddRequest and Abort, gives StepOutputs. `config` is resolved."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None, recorder: NoRecorder = NoRecorder()) -> None:
        self.config = config
        self.executor = executor or executor_module(config.device.executor).EXECUTOR(config)
        layout = self._layout()
        self.executor.allocate(layout)
        self.pipeline = Pipeline(self.executor, config.scheduler.pipeline_depth, recorder)
        self.kv = KVManager(layout, config.cache.enable_prefix_caching)
        self.scheduler = Scheduler(config.scheduler, self.kv, self.pipeline)

    def step(self) -> StepOutputs:
        """One turn: fill the pipeline, then take in the oldest step."""
        while self.pipeline.has_room and (step := self.scheduler.plan()) is not None:
            self.pipeline.submit(step)
        if not self.pipeline.steps:
            if self.scheduler.has_work:
                raise EngineError("requests are waiting and none can run: this is a bug in the scheduler")
            return StepOutputs([], self.stats())
        step, result = self.pipeline.wait()
        deltas = self.scheduler.apply(step, result)
        return StepOutputs(deltas, self.stats(step.plan.total_tokens))

    def add(self, message: AddRequest) -> None:
        self.scheduler.add(Request(message, self.config.model.max_model_len))

    def abort(self, message: Abort) -> None:
        choices = [message.choice_idx] if message.choice_idx is not None else [
            choice_idx for request_id, choice_idx in list(self.scheduler.requests) if request_id == message.request_id
        ]  # fmt: skip
        for choice_idx in choices:
            self.scheduler.abort(message.request_id, choice_idx)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def stats(self, step_tokens: int = 0) -> EngineStats:
        scheduler = self.scheduler
        return msgspec.structs.replace(
            scheduler.stats,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=self.kv.usage,
            step_tokens=step_tokens,
        )

    def close(self) -> None:
        self.executor.close()

    def _layout(self) -> KVLayout:
        """Groups, and as many blocks as the memory holds; refuses when one longest request would not fit."""
        cache, scheduler = self.config.cache, self.config.scheduler
        specs = self.executor.kv_specs()
        layout = form_layout(specs, cache.block_size, num_blocks=0)
        if cache.num_gpu_blocks_override is not None:
            num_blocks = cache.num_gpu_blocks_override
        else:
            num_blocks = num_blocks_for(layout, cache.kv_cache_memory_bytes or self.executor.kv_memory_bytes())
        layout = msgspec.structs.replace(layout, num_blocks=num_blocks)
        check_capacity(layout, self.config.model.max_model_len, scheduler.max_num_batched_tokens)
        log.info("KV cache: %d blocks, %.2f GiB", num_blocks, num_blocks * layout.block_bytes / 2**30)
        return layout
