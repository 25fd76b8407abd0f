"""One worker, one device: loads the model, owns the cache's memory, runs steps.

Started by `executor/` by dotted path. Must not know requests, text or clients.
"""

import logging
import time
from dataclasses import dataclass

import torch

from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.kv.specs import KVLayout, KVSpec
from quire.layers.linear import Linear
from quire.step import StepPlan, StepResult
from quire.utils.memory import available_bytes
from quire.worker.build import DTYPES, build
from quire.worker.kv_cache import attach_kv, kv_specs
from quire.worker.load import checkpoint_tensors, dummy_tensors, load_weights
from quire.worker.runner import Runner

log = logging.getLogger(__name__)

# A CPU's memory is shared with everything else on the machine, so the share is taken only up to here unless asked.
MAX_CPU_KV_BYTES = 4 << 30


def kv_memory_bytes(config: EngineConfig) -> int:
    return min(MAX_CPU_KV_BYTES, int(available_bytes() * config.cache.gpu_memory_utilization))


@dataclass
class Ready:
    """A step that is already done: a CPU computes when told to."""

    done: StepResult

    def result(self) -> StepResult:
        return self.done


class Worker:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.model.dtype]
        torch.set_num_threads(config.device.num_threads)
        started = time.monotonic()
        files = find(config.model.model)
        hf_config = read_config(files)
        self.vocab_size = hf_config["vocab_size"]
        self.model = build(config, hf_config)
        dummy = config.model.load_format == "dummy"
        tensors = dummy_tensors(self.model, config.model.seed) if dummy else checkpoint_tensors(files, hf_config)
        load_weights(self.model, tensors, self.dtype)
        log.info("weights loaded: %.0f MB in %.2f s", self.weight_bytes / 1e6, time.monotonic() - started)

    @property
    def weight_bytes(self) -> int:
        seen = {p.data_ptr(): p.nbytes for p in self.model.parameters()}
        linears = [m.method for m in self.model.modules() if isinstance(m, Linear)]
        tied = [m for m in linears if getattr(m, "weight", None) is not None and m.weight.data_ptr() in seen]
        return sum(seen.values()) + sum(m.num_bytes for m in linears if m not in tied)

    def kv_specs(self) -> dict[str, KVSpec]:
        return kv_specs(self.model, self.dtype)

    def kv_memory_bytes(self) -> int:
        return kv_memory_bytes(self.config)

    def allocate(self, layout: KVLayout) -> None:
        attach_kv(self.model, layout, self.dtype)
        self.runner = Runner(
            self.model, layout, self.config.scheduler.max_num_seqs, self.config.model.max_model_len, self.vocab_size
        )

    def forward(self, plan: StepPlan) -> None:
        self.runner.forward(plan)

    def sample(self, plan: StepPlan) -> Ready:
        return Ready(self.runner.sample())
