"""Which implementation computes what: the one place that decides, and that can say why.

Called by layers when they are attached, through their runtime. A candidate is a module whose
`why_not(device, dtype, **needs)` returns None, or the reason why it cannot be used. Must not know layers.
"""

import importlib
import logging
from collections.abc import Iterator
from types import ModuleType

import torch

from quire import registry
from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # of a KV cache that does not have the model's dtype

# What is computed -> its modules for CPUs and for GPUs, the best first.
CANDIDATES: dict[str, dict[str, tuple[str, ...]]] = {
    "elementwise": {
        "cpu": ("quire.ops.elementwise.cpu", "quire.ops.elementwise.reference"),
        "gpu": ("quire.ops.elementwise.triton",),
    },
    "linear": {
        "cpu": ("quire.quant.plain.packed", "quire.quant.plain.dense"),
        "gpu": ("quire.quant.plain.dense_gpu",),
    },
    "quantized linear": {
        "cpu": ("quire.quant.kept.packed", "quire.quant.kept.numbers"),
        "gpu": ("quire.quant.kept.triton",),
    },
    "attention": {
        "cpu": ("quire.layers.attention.native", "quire.layers.attention.reference"),
        "gpu": ("quire.layers.attention.triton",),
    },
    "latent attention": {
        "cpu": ("quire.layers.latent.reference",),
        "gpu": ("quire.layers.latent.triton",),
    },
    "experts": {
        "cpu": ("quire.layers.experts.packed", "quire.layers.experts.torch"),
        "gpu": ("quire.layers.experts.triton", "quire.layers.experts.torch"),
    },
}
# For GPUs, from other packages: used only if `--attention-backend` names them.
ON_REQUEST = ("quire.layers.attention.flash_attn", "quire.layers.attention.flashinfer")
ATTENTION = "quire.layers.attention"


def runs_on_triton(config: EngineConfig) -> bool:
    """Whether GPU kernels are used; on a CPU, Triton's interpreter runs them if the config says so."""
    return config.device.device == "cuda" or config.device.interpret_triton


def cache_dtype(config: EngineConfig) -> torch.dtype:
    """What cached values are stored as."""
    return CODE_DTYPES.get(config.cache.kv_cache_dtype, DTYPES[config.model.dtype])


class Chooser:
    """Chooses modules, and remembers which were taken and why better candidates were passed over."""

    def __init__(self, config: EngineConfig) -> None:
        self.kind = "gpu" if runs_on_triton(config) else "cpu"
        self.device = torch.device(config.device.device)
        self.dtype = DTYPES[config.model.dtype]
        self.cache_dtype = cache_dtype(config)
        self.asked = config.device.attention_backend
        self.taken: dict[str, str] = {}  # what -> name of the module
        self.passed_over: dict[str, str] = {}  # "what: name" -> why

    def __call__(self, what: str, **needs: object) -> ModuleType:
        """The best module that can be used. `needs`: properties of the layer that asks."""
        reasons: dict[str, str] = {}
        for module in self._candidates(what):
            name = module.__name__.rsplit(".", 1)[-1]
            why = module.why_not(self.device, self.dtype, **needs)
            if why is None:
                self._note(what, name, reasons)
                return module
            reasons[name] = why
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedModelError(
            f"{what} cannot be computed on this device ({why}): add --device cpu, or leave --attention-backend out"
        )

    def _candidates(self, what: str) -> Iterator[ModuleType]:
        if what == "attention" and self.asked != "auto":
            path = f"{ATTENTION}.{self.asked}"
            if self.kind == "gpu" and path in CANDIDATES[what]["cpu"]:
                raise ConfigError(f"--attention-backend {self.asked} is for the CPU: leave it out, or add --device cpu")
            if self.kind == "cpu" and path in (*CANDIDATES[what]["gpu"], *ON_REQUEST):
                raise ConfigError(f"--attention-backend {self.asked} needs an NVIDIA GPU: leave it out")
            yield registry.load(ATTENTION, self.asked)
            return
        yield from map(importlib.import_module, CANDIDATES[what][self.kind])

    def _note(self, what: str, name: str, reasons: dict[str, str]) -> None:
        self.taken.setdefault(what, name)
        for other, why in reasons.items():
            if self.passed_over.setdefault(f"{what}: {other}", why) is why:
                log.debug("%s by %s, not by %s: %s", what, name, other, why)
