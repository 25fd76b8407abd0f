"""One worker, one device: loads the model, owns the cache's memory, runs steps.

Started by `executor/` by dotted path. Must not know requests, text or clients.
"""

import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire import registry
from quire.checkpoint.find import ModelFiles, find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig, resolved
from quire.distributed.base import Ranks
from quire.errors import ConfigError, UnsupportedModelError
from quire.kv.groups import form_layout, narrowed, num_blocks_for
from quire.kv.specs import CacheSpec, KVLayout
from quire.layers.attention.base import Limits
from quire.layers.decoder import CausalLM
from quire.layers.linear import LMHead
from quire.layers.weights import CheckpointTensor
from quire.ops.transfer import Upload
from quire.quant.base import LARGER_BLOCKS, SMALLEST_BLOCK, CutError, possible_divisions
from quire.sampling.custom import load as load_processors
from quire.spec import draft_model, synthetic
from quire.spec.base import NoDrafter
from quire.worker.build import Model, build, stage_layers
from quire.worker.choose import DTYPES, cache_dtype, runs_on_triton
from quire.worker.device import Device
from quire.worker.dummy import dummy_tensors
from quire.worker.host_copies import HostCopies
from quire.worker.kv_cache import KVMemory, kv_specs
from quire.worker.load import (
    checkpoint_tensors,
    declared_weights,
    division_checks,
    layers,
    load_weights,
    translated,
)
from quire.worker.runner import Runner

log = logging.getLogger(__name__)

DRAFT = "draft."  # begins the names of a draft model's caches


def device_module(config: EngineConfig) -> Device:
    """`cpu/device.py` or `gpu/device.py`. The latter needs Triton, which comes with torch's builds for GPUs."""
    try:
        if runs_on_triton(config):
            from quire.worker.gpu import device as gpu

            return gpu
        from quire.worker.cpu import device as cpu

        return cpu
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"GPU kernels need {error.name}, which is not installed: pip install {error.name}, or add --device cpu"
        ) from None


def weight_bytes(model: Model) -> int:
    """Tied layers have the same tensor."""
    tensors = [tensor for layer in layers(model) for tensor in layer.tensors()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


class Worker:
    def __init__(self, config: EngineConfig, ranks: Ranks | None = None) -> None:
        """`ranks`: its place among the workers of its engine; None: it is the only one."""
        self.config = config
        self.ranks = ranks or Ranks(device_idx=config.parallel.first_device)
        self.dtype = DTYPES[config.model.dtype]
        self.device = torch.device(config.device.device)
        torch.set_num_threads(resolved(config.device.num_threads))
        self.module = device_module(config)
        self.module.open(self.device, self.ranks.device_idx)
        self.is_rehearsed = self.device.type == "cpu"  # a GPU must run the largest step once before it serves
        self.away: HostCopies | None = None  # weights, while the device's memory is not ours
        self._load_models()
        self.processors = load_processors(config.structured.logits_processors, self.vocab_size, self.device)

    def _load_models(self) -> None:
        started = time.monotonic()
        config = self.config
        files = find(config.model.model)
        hf_config = read_config(files)
        self.vocab_size = hf_config["vocab_size"]
        self.model = self._load(config, files, hf_config)
        self.draft: Model | None = None  # a small model that guesses
        self.drafter = self._drafter(config)
        log.info("weights loaded: %.0f MB in %.2f s", self.weight_bytes / 1e6, time.monotonic() - started)

    def _drafter(self, config: EngineConfig) -> NoDrafter:
        speculation = config.speculative.speculation
        if speculation is None or speculation.is_of_core:
            return NoDrafter()
        if config.structured.logits_processors:
            log.warning("no tokens are guessed: --logits-processors look at the one token of a request that is next")
            return NoDrafter()
        if speculation.chances:
            log.warning("guessed tokens count as right by chance: for measuring only, the text means nothing")
            return synthetic.Drafter(speculation, self.vocab_size, self.device)
        if not speculation.model:
            return registry.load("quire.spec", speculation.method).Drafter(speculation, runs_on_triton(config))
        files = find(speculation.model)
        small = config.replace(model=speculation.model, quantization=speculation.quantization)
        self.draft = self._load(small, files, read_config(files))
        cost = weight_bytes(self.draft) / weight_bytes(self.model)
        max_tokens = resolved(config.scheduler.max_num_batched_tokens)
        return draft_model.Drafter(speculation.num_tokens, cost, resolved(config.model.max_model_len), max_tokens)

    def _load(self, config: EngineConfig, files: ModelFiles, hf_config: dict[str, Any]) -> Model:
        try:
            return self._load_divided(config, files, hf_config)
        except CutError as error:  # of one weight
            reason, num_ranks = error.reason, error.num_ranks
        gc.collect()  # what was loaded before it
        block = self._dividing_block(config, files, hf_config, reason, num_ranks)
        return self._load_divided(config, files, hf_config, block)

    def _load_divided(
        self, config: EngineConfig, files: ModelFiles, hf_config: dict[str, Any], cut_block: int = SMALLEST_BLOCK
    ) -> Model:
        """`cut_block`: ranks' parts are made of blocks of so many numbers, if possible."""
        model = build(config, hf_config, ranks=self.ranks, cut_block=cut_block)
        is_dummy = config.model.load_format == "dummy"
        upload = Upload(self.device) if self.device.type == "cuda" and not is_dummy else None
        elsewhere = self._take_stage(model)
        with self.module.capacity("loading the weights"):
            tensors = self._tensors(model, config, files, hf_config)
            self.bytes_read = load_weights(model, tensors, self.ranks.group, elsewhere, upload)
        return model

    def _dividing_block(
        self, config: EngineConfig, files: ModelFiles, hf_config: dict[str, Any], reason: str, num_ranks: int
    ) -> int:
        """The smallest block with which no weight of the whole model is cut."""
        possible: set[int] = set()  # numbers of ranks
        for block in (SMALLEST_BLOCK, *LARGER_BLOCKS):
            whole = build(config, hf_config, cut_block=block)
            possible.update(possible_divisions(division_checks(whole, self._tensors(whole, config, files, hf_config))))
            if num_ranks in possible:
                return block
        raise UnsupportedModelError(str(CutError(reason, num_ranks, sorted(possible))))

    def _tensors(
        self, model: Model, config: EngineConfig, files: ModelFiles, hf_config: dict[str, Any]
    ) -> Iterator[tuple[str, CheckpointTensor]]:
        if config.model.load_format == "dummy":
            return dummy_tensors(model, config.model.seed, self.device)
        found = checkpoint_tensors(files, hf_config)
        return translated(model, found) if files.kind == "hf" else found  # GGUF files have the model's own names

    def _take_stage(self, model: Model) -> set[str]:
        """Leaves only this stage's layers in the model; returns the names of the tensors that only others want."""
        if self.ranks.num_stages == 1 or not isinstance(model, CausalLM):
            return set()
        everything = set(declared_weights(model))
        model.take_stage(*stage_layers(model, self.ranks.num_stages)[self.ranks.stage])
        return everything - set(declared_weights(model))

    @property
    def weight_bytes(self) -> int:
        return sum(weight_bytes(model) for model in (self.model, self.draft) if model is not None)

    @property
    def num_graphs(self) -> int:
        return self.runner.recordings.num_recorded

    def kv_specs(self) -> dict[str, CacheSpec]:
        specs = kv_specs(self.model, cache_dtype(self.config))
        return specs if self.draft is None else specs | kv_specs(self.draft, cache_dtype(self.config), DRAFT)

    def num_blocks(self, layout: KVLayout) -> list[int]:
        """How many blocks of each pool there is memory for."""
        memory_bytes = self.config.cache.kv_cache_memory_bytes or self._kv_memory_bytes()
        return num_blocks_for(narrowed(layout, self.kv_specs()), memory_bytes, self.config.scheduler.max_num_seqs)

    def _kv_memory_bytes(self) -> int:
        self.is_rehearsed = True
        layout = form_layout(self.kv_specs(), resolved(self.config.cache.block_size), num_blocks=2)
        with self.module.capacity("running the largest step"):
            return self.module.kv_memory_bytes(self.config, lambda: self._runner(layout))

    def allocate(self, layout: KVLayout) -> None:
        started = time.monotonic()
        self.layout = layout
        with self.module.capacity("making the KV cache"):
            self.runner = self._runner(layout)
            self.runner.batch.sampling.custom = [(processor, set()) for processor in self.processors]
            if not self.is_rehearsed:  # the number of blocks was given, so nothing has run yet
                self.runner.rehearse()
            self.runner.get_ready()
        log.info("runner ready in %.2f s", time.monotonic() - started)

    def _runner(self, layout: KVLayout) -> Runner:
        memory = KVMemory(narrowed(layout, self.kv_specs()), self.device, self.module.copy_blocks)
        memory.attach(self.model)
        limits = self._limits(self.model, self.drafter.num_drafts)
        runner = Runner(self.model, memory, self.module, limits, self.vocab_size, self.drafter, ranks=self.ranks)
        if self.draft is not None and isinstance(self.drafter, draft_model.Drafter):
            memory.attach(self.draft, DRAFT)
            limits = self._limits(self.draft, 1)
            small = Runner(self.draft, memory, self.module, limits, self.vocab_size, NoDrafter(), runner.batch)
            self.drafter.runner = runner.small = small
        return runner

    def _limits(self, model: Model, num_drafts: int) -> Limits:
        scheduler = self.config.scheduler
        if isinstance(model, CausalLM):
            hidden_size = model.config.hidden_size
        else:
            hidden_size = next(layer.in_features for layer in layers(model) if isinstance(layer, LMHead))
        return Limits(
            num_rows=scheduler.max_num_seqs,
            max_tokens=resolved(scheduler.max_num_batched_tokens),
            max_len=resolved(self.config.model.max_model_len),
            hidden_like=torch.empty(0, hidden_size, dtype=self.dtype, device=self.device),
            num_drafts=num_drafts,
        )

    def sleep(self, keep_weights: bool) -> None:
        """Gives the device's memory back. Weights on a GPU can be kept in the host's memory; else they are read again.

        What was recorded is lost, too: it names addresses.
        """
        self.runner.close()
        del self.runner
        if isinstance(self.drafter, draft_model.Drafter):
            del self.drafter.runner
        if keep_weights and self.device.type == "cuda":
            self.away = HostCopies(self._weights())
        else:
            del self.model, self.draft, self.drafter
        self.module.release()

    def wake_up(self) -> None:
        if self.away is not None:
            self.away.restore()
            self.away = None
        else:
            self._load_models()
        self.allocate(self.layout)

    def _weights(self) -> list[Tensor]:
        models = [model for model in (self.model, self.draft) if model is not None]
        return [tensor for model in models for layer in layers(model) for tensor in layer.tensors()]

    def close(self) -> None:
        """Gives the device's memory back."""
        for name in ("model", "draft", "drafter", "runner"):
            vars(self).pop(name, None)
        self.module.release()
