"""Builds a model without numbers, and attaches its layers to the runtime they will run in.

Called by the worker before weights are loaded. Constructors stay pure mathematics; what a layer needs besides it takes from the runtime.
Which implementation computes what is choose.py's business.
"""

import dataclasses
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import torch
from torch import nn

from quire import registry
from quire.config import EngineConfig
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer, Runtime, StepContext
from quire.quant.base import Method, Use
from quire.quant.plain.dense import Dense
from quire.worker.choose import Chooser

FALLBACK = "quire.models._transformers"  # runs what has no file, with others' layers

log = logging.getLogger(__name__)


def model_module(hf_config: dict[str, Any]) -> ModuleType:
    """The file that has the checkpoint's architecture, or the fallback, which may refuse it."""
    by_architecture = {
        a: name for name, archs in registry.literals("quire.models", "ARCHITECTURES").items() for a in archs
    }
    for architecture in hf_config["architectures"]:
        if architecture in by_architecture:
            return registry.load("quire.models", by_architecture[architecture])
    return importlib.import_module(FALLBACK)


def build(config: EngineConfig, hf_config: dict[str, Any]) -> nn.Module:
    """The model on `meta`, everything attached but weights and KV tensors."""
    model = empty(hf_config, config.model.dtype)
    attach(model, make_runtime(config, hf_config, model.checkpoint_path))
    return model


def empty(hf_config: dict[str, Any], dtype: str) -> nn.Module:
    """The model on `meta`, nothing attached."""
    module = model_module(hf_config)
    try:
        with torch.device("meta"):
            return module.MODEL(_config(module, {**hf_config, "dtype": dtype}))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.debug("a constructor failed", exc_info=error)
        raise BadModelFileError(
            f"the model's config.json contradicts itself: {str(error).splitlines()[0]:.200}"
        ) from None


def _config(module: ModuleType, hf_config: dict[str, Any]) -> Any:
    if module.Config is None:
        return hf_config
    fields = {f.name: f for f in dataclasses.fields(module.Config)}
    # A null means "none" where the family knows that, elsewhere the default.
    nullable = {name for name, field in fields.items() if type(None) in get_args(field.type)}
    given = {
        name: hf_config[name]
        for name in fields
        if name in hf_config and (hf_config[name] is not None or name in nullable)
    }
    missing = [n for n, f in fields.items() if n not in given and f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise UnsupportedModelError(f"the model's config.json lacks {missing[0]!r}: it is incomplete")
    return module.Config(**given)


def make_runtime(config: EngineConfig, hf_config: dict[str, Any], checkpoint_path: Callable[[str], str]) -> Runtime:
    """`checkpoint_path`: what checkpoints call a module of the model."""
    choose = Chooser(config)
    quantization, settings = _quantization(config, hf_config)
    plain: dict[Use, type[Method]] = {Use.PRODUCT: choose("linear").METHOD, Use.ROWS: Dense, Use.NUMBERS: Dense}
    return Runtime(
        device=choose.device,
        dtype=choose.dtype,
        max_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        kernels=choose("elementwise"),
        logits_dtype=None if choose.kind == "gpu" else torch.float32,  # GPUs' samplers widen as they read
        choose=choose,
        find_method=lambda path, use: quantization.method(checkpoint_path(path), use, plain[use], settings),
        context=StepContext(),
    )


def _quantization(config: EngineConfig, hf_config: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """A file of quant/, and what config.json says to it: the checkpoint's own quantization, or else the one that was asked for."""
    settings = hf_config.get("quantization_config") or {}
    asked = settings.get("quant_method", "unknown") if settings else config.model.quantization
    name = str(asked).replace("-", "_")
    if name not in registry.names("quire.quant"):
        raise UnsupportedModelError(
            f"weights quantized with {asked!r:.40} are not supported yet: use the original or a GGUF file"
        )
    is_dummy = config.model.load_format == "dummy"  # random weights are plain numbers
    return registry.load("quire.quant", "none" if is_dummy and settings else name), settings


def attach(model: nn.Module, runtime: Runtime) -> None:
    """From within: a layer finds those inside it attached."""
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, Layer):
            module.attach(runtime, path)
