"""Builds a model without weights, and attaches its layers to the runtime they will run in.

Called by the worker before weights are loaded. Constructors of layers know only sizes; device, dtype and kernels come
from the runtime. `choose.py` decides which implementation computes what.
"""

import dataclasses
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
from torch import nn

from quire import registry
from quire.config import EngineConfig, quantization_file, resolved
from quire.distributed.base import ALONE, Ranks
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer, Runtime, StepContext
from quire.quant.base import SMALLEST_BLOCK, Choice, DivisionError, MethodMaker, QuantizedMaker, Use
from quire.quant.kept.numbers import Numbers
from quire.quant.plain.dense import Dense
from quire.worker.choose import Chooser

if TYPE_CHECKING:
    from quire.layers.decoder import CausalLM
    from quire.models._transformers import TransformersModel

Model: TypeAlias = "CausalLM | TransformersModel"  # what the runner runs

FALLBACK = "quire.models._transformers"  # runs architectures without a file, with the layers of transformers

log = logging.getLogger(__name__)


def model_module(hf_config: dict[str, Any]) -> ModuleType:
    """The file that has the checkpoint's architecture, or the fallback, which may refuse it."""
    name = registry.find_literal("quire.models", "ARCHITECTURES", hf_config["architectures"])
    return importlib.import_module(FALLBACK) if name is None else registry.load("quire.models", name)


def build(
    config: EngineConfig,
    hf_config: dict[str, Any],
    choose: Chooser | None = None,
    ranks: Ranks = ALONE,
    cut_block: int = SMALLEST_BLOCK,
) -> Model:
    """The model on `meta`, its layers attached; only weights and KV tensors are missing."""
    model = empty(hf_config, config.model.dtype)
    attach(model, make_runtime(config, hf_config, model.checkpoint_path, choose, ranks, cut_block))
    return model


def empty(hf_config: dict[str, Any], dtype: str) -> Model:
    """The model on `meta`, nothing attached."""
    module = model_module(hf_config)
    try:
        with torch.device("meta"):
            return module.MODEL(_config(module, {**hf_config, "dtype": dtype}))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.debug("a constructor failed", exc_info=error)
        reason = str(error).splitlines()[0]
        raise BadModelFileError(f"the model's config.json contradicts itself: {reason:.200}") from None


def _config(module: ModuleType, hf_config: dict[str, Any]) -> Any:
    """The family's own config, from the fields of config.json that it knows."""
    if module.Config is None:
        return hf_config
    given: dict[str, Any] = {}
    for field in dataclasses.fields(module.Config):
        # A null in config.json is None if the field allows that, else the field's default.
        is_nullable = type(None) in get_args(field.type)
        is_given = field.name in hf_config and (is_nullable or hf_config[field.name] is not None)
        if is_given:
            given[field.name] = hf_config[field.name]
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise UnsupportedModelError(f"the model's config.json lacks {field.name!r}: it is incomplete")
    return module.Config(**given)


def make_runtime(
    config: EngineConfig,
    hf_config: dict[str, Any],
    checkpoint_path: Callable[[str], str],
    choose: Chooser | None = None,
    ranks: Ranks = ALONE,
    cut_block: int = SMALLEST_BLOCK,
) -> Runtime:
    """`checkpoint_path`: from a module's path in the model to its path in checkpoints."""
    choose = choose or Chooser(config)
    find_method = _quantization(config, hf_config)
    plain, quantized = choose("linear"), choose("quantized linear")
    product = plain.METHOD, quantized.METHOD
    rows = Dense, quantized.METHOD
    methods: dict[Use, tuple[MethodMaker, QuantizedMaker]] = {
        Use.PRODUCT: product,
        Use.HEAD: product,
        Use.ROWS: rows,
        Use.TIED_ROWS: rows,
        Use.EXPERTS: (plain.EXPERTS, quantized.EXPERTS),
        Use.NUMBERS: (Dense, Numbers),
    }
    is_gpu = choose.kind == "gpu"
    return Runtime(
        device=choose.device,
        dtype=choose.dtype,
        max_len=resolved(config.model.max_model_len),
        block_size=resolved(config.cache.block_size),
        cache_dtype=choose.cache_dtype,
        kernels=choose("elementwise"),
        logits_dtype=None if is_gpu else torch.float32,  # samplers of GPUs convert as they read
        choose=choose,
        find_method=lambda path, use: find_method(checkpoint_path(path), Choice(use, *methods[use], is_gpu)),
        context=StepContext(),
        ranks=ranks,
        cut_block=cut_block,
        splits_experts=not config.parallel.enable_expert_parallel,
    )


def _quantization(config: EngineConfig, hf_config: dict[str, Any]) -> Callable[[str, Choice], MethodMaker]:
    """What chooses the method of each weight, by its path in checkpoints."""
    settings = hf_config.get("quantization_config") or {}
    asked = settings.get("quant_method", "unknown") if settings else config.model.quantization
    name = quantization_file(str(asked))
    if name not in registry.names("quire.quant"):
        raise UnsupportedModelError(
            f"weights quantized with {asked!r:.40} are not supported: use the original, or a checkpoint quantized with "
            f"one of {', '.join(registry.names('quire.quant'))}"
        )
    return registry.load("quire.quant", name).quantization(settings)


def stage_layers(model: "CausalLM", num_stages: int) -> list[tuple[int, int]]:
    """The first layer of each stage of a pipeline, and the one after its last; as even as can be.

    Layers that share a cache stay in one stage.
    """
    num_layers = len(model.model.layers)
    owners = {
        int(path.split(".")[2]): layer.shares for path, layer in model.named_modules() if getattr(layer, "shares", None)
    }
    shared = [(int(owner.split(".")[2]), reader) for reader, owner in owners.items()]
    cuts = [cut for cut in range(1, num_layers) if not any(owner < cut <= reader for owner, reader in shared)]
    if len(cuts) < num_stages - 1:
        why = f"has {num_layers} layers"
        if len(cuts) < num_layers - 1:
            why += ", some of which read the caches of others and stay with them"
        raise UnsupportedModelError(f"the model {why}: --pipeline-parallel-size can be at most {len(cuts) + 1}")
    # Of all ways to cut, from the end: (layers of the longest stage, cuts).
    best: dict[int, tuple[int, tuple[int, ...]]] = {start: (num_layers - start, ()) for start in (0, *cuts)}
    for _ in range(num_stages - 1):
        ways = {
            start: min(
                (max(cut - start, longest), (cut, *later)) for cut, (longest, later) in best.items() if cut > start
            )
            for start in (0, *cuts)
            if any(cut > start for cut in best)
        }
        best = ways
    bounds = (0, *best[0][1], num_layers)
    return list(zip(bounds, bounds[1:]))


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Attaches inner layers first: a layer may rely on those inside it."""
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, Layer):
            try:
                module.attach(runtime, path)
            except DivisionError as error:
                raise UnsupportedModelError(
                    f"--tensor-parallel-size {runtime.ranks.group.size} is too many for this model: {path} has {error}"
                ) from None
