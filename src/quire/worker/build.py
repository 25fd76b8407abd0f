"""Builds a model without numbers and attaches to each layer what it needs: method, kernels, backend, derived tables.

Called by the worker before weights are loaded. Constructors stay pure mathematics; this walk is the only place
that decides how a layer is computed.
"""

import dataclasses
import importlib
import logging
from types import ModuleType
from typing import Any, get_args

import torch
from torch import nn

from quire import registry
from quire.config import EngineConfig
from quire.errors import BadModelFileError, ConfigError, UnsupportedModelError
from quire.layers.attention import ON_REQUEST, PREFERRED, Attention, StepContext
from quire.layers.experts import PREFERRED as EXPERTS
from quire.layers.linear import Linear, LMHead
from quire.layers.mla import MLA
from quire.layers.moe import Experts
from quire.ops import choose_kernels
from quire.ops.ref import mla as latent_reference

FALLBACK = "quire.models._transformers"  # runs what has no file, with others' layers

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def model_module(hf_config: dict[str, Any]) -> ModuleType:
    """The file that has the checkpoint's architecture, or the fallback, which may refuse it."""
    by_architecture = {a: name for name, archs in registry.literals("quire.models", "ARCHITECTURES").items() for a in archs}
    for architecture in hf_config["architectures"]:
        if architecture in by_architecture:
            return registry.load("quire.models", by_architecture[architecture])
    return importlib.import_module(FALLBACK)


def build(config: EngineConfig, hf_config: dict[str, Any]) -> nn.Module:
    """The model on `meta`, everything attached but weights and KV tensors."""
    quantization = hf_config.get("quantization_config")
    method = quantization and quantization.get("quant_method", "unknown")
    if method and method not in getattr(model_module(hf_config).MODEL, "reads", ()):
        raise UnsupportedModelError(f"weights quantized with {method!r:.40} are not supported yet: use the original or a GGUF file")
    model = empty(hf_config, config.model.dtype)
    attach(model, config)
    return model


def empty(hf_config: dict[str, Any], dtype: str) -> nn.Module:
    """The model on `meta`, nothing attached."""
    module = model_module(hf_config)
    try:
        with torch.device("meta"):
            return module.MODEL(_config(module, {**hf_config, "dtype": dtype}))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.debug("a constructor failed", exc_info=error)
        raise BadModelFileError(f"the model's config.json contradicts itself: {str(error).splitlines()[0]:.200}") from None


def _config(module: ModuleType, hf_config: dict[str, Any]) -> Any:
    if not hasattr(module, "Config"):
        return hf_config  # the fallback reads all of it
    fields = {f.name: f for f in dataclasses.fields(module.Config)}
    # A null means "none" where the family knows that, elsewhere the default.
    nullable = {name for name, field in fields.items() if type(None) in get_args(field.type)}
    given = {name: hf_config[name] for name in fields if name in hf_config and (hf_config[name] is not None or name in nullable)}
    missing = [n for n, f in fields.items() if n not in given and f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise UnsupportedModelError(f"the model's config.json lacks {missing[0]!r}: it is incomplete")
    return module.Config(**given)


def attach(model: nn.Module, config: EngineConfig) -> None:
    dtype, device = DTYPES[config.model.dtype], torch.device(config.device.device)
    kernels = choose_kernels(dtype, runs_on_triton(config))
    context = StepContext()
    method = registry.load("quire.quant", kernels.linear_method).METHOD
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels
        if hasattr(module, "context"):
            module.context = context
        if isinstance(module, Linear):
            if isinstance(module, LMHead):
                module.logits_dtype = kernels.logits_dtype
            module.method = method(module.in_features, module.shard_sizes, dtype, device, config.model.quantization != "none")
        elif isinstance(module, Attention):
            module.backend = _backend(config, dtype, module.head_size)
            module.limit(config.model.max_model_len)
        elif isinstance(module, MLA):
            module.backend = _latent_backend(config, dtype, module)
        elif isinstance(module, Experts):
            module.backend = _experts_backend(config, dtype)
        elif hasattr(module, "materialize"):
            module.materialize(config.model.max_model_len, device)
    model.context = context


def _latent_backend(config: EngineConfig, dtype: torch.dtype, layer: MLA) -> ModuleType:
    if not runs_on_triton(config):
        return latent_reference
    from quire.ops import mla

    if not mla.supports(dtype, layer.latent_size, layer.rope_size, config.cache.block_size):
        raise UnsupportedModelError(f"latents of {layer.latent_size} + {layer.rope_size} values are not supported on GPUs: add --device cpu")
    return mla


def _experts_backend(config: EngineConfig, dtype: torch.dtype) -> ModuleType:
    candidates = (registry.load("quire.layers.experts", name) for name in EXPERTS["cuda" if runs_on_triton(config) else "cpu"])
    return next(backend for backend in candidates if backend.supports(dtype, torch.device(config.device.device)))


def runs_on_triton(config: EngineConfig) -> bool:
    """A GPU does; a CPU only if told to, in Triton's interpreter: that is how tests run what GPUs run."""
    return config.device.device == "cuda" or config.device.attention_backend in (*PREFERRED["cuda"], *ON_REQUEST)


def _backend(config: EngineConfig, dtype: torch.dtype, head_size: int) -> ModuleType:
    name, block_size = config.device.attention_backend, config.cache.block_size
    preferred = PREFERRED[config.device.device]
    if config.device.device == "cuda" and name not in ("auto", *preferred, *ON_REQUEST):
        raise ConfigError(f"--attention-backend {name} is for the CPU: leave it out, or add --device cpu")
    names = preferred if name == "auto" else (name,)
    for candidate in names:
        backend = registry.load("quire.layers.attention", candidate)
        if backend.supports(dtype, head_size, block_size):
            return backend
    raise ConfigError(f"attention backend {name!r} cannot do {dtype}, head size {head_size}, block size {block_size}")
