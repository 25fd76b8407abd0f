"""The only place where "auto" becomes a value.

Called once by the entry points (`api/`), when the model's files are found and its config is read; all other code gets
the result. Pure: the same inputs give the same config.
"""

from dataclasses import dataclass
from typing import Any, get_args

from quire import registry
from quire.config.engine import (
    KV_CACHE_ALIASES,
    LOCAL_EXECUTORS,
    ONLINE_QUANTIZATIONS,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    Quantization,
    quantization_file,
)
from quire.config.speculation import Speculation
from quire.errors import ConfigError, UnsupportedModelError

DEFAULT_CONTEXT_TOKENS = 2048  # for configs that do not say
STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
SERVING_STEP_TOKENS = {"cpu": 512, "cuda": 2048}  # fewer: every streaming client waits for the whole step


@dataclass(frozen=True)
class Machine:
    """What a config is resolved for."""

    num_cores: int
    num_gpus: int = 0  # that can be used
    gpu_problem: str = ""  # why the GPUs of this machine cannot be used, if so
    gpu_is_broken: bool = False  # the card or its driver fails: an error, even where the CPU could be used instead
    num_threads: int = 0  # that every process shall have; 0: not said


@dataclass(frozen=True)
class DraftFiles:
    """A draft model's files: their path, "gguf" or "hf", and the model's config in Hugging Face's words."""

    path: str
    kind: str
    hf_config: dict[str, Any]


def resolve(
    config: EngineConfig,
    path: str,
    kind: str,
    hf_config: dict[str, Any],
    machine: Machine,
    serving: bool = False,
    draft: DraftFiles | None = None,
) -> EngineConfig:
    """`path` and `kind` ("gguf" or "hf") of the model's files, its config in Hugging Face's words."""
    model, scheduler = config.model, config.scheduler
    # The GPUs of a cluster need not be on this machine.
    is_elsewhere = config.parallel.executor == "ray" and config.device.device == "cuda"
    device = "cuda" if is_elsewhere else choose_device(config.device.device, machine)
    _check_devices(config, device, machine)
    _check_division(config.parallel, hf_config)
    dtype = _auto_dtype(device, hf_config) if model.dtype == "auto" else model.dtype
    cache_dtype = _kv_cache_dtype(config.cache.kv_cache_dtype, dtype, hf_config)
    # A value's tokens lie side by side there: so many fill what the memory reads at once.
    default_block = 64 if device == "cuda" and cache_dtype in ("fp8", "int8") else 16
    step_tokens = (SERVING_STEP_TOKENS if serving else STEP_TOKENS)[device]
    max_model_len = _max_model_len(model.max_model_len, hf_config)
    speculation = config.speculative.speculation
    if speculation is not None and speculation.num_tokens >= max_model_len:
        raise ConfigError(
            f"num_speculative_tokens ({speculation.num_tokens}) must be below max_model_len ({max_model_len})"
        )
    if speculation is not None and speculation.chances and model.load_format != "dummy":
        raise ConfigError("synthetic acceptance makes text meaningless: it needs --load-format dummy")
    if speculation is not None and not speculation.is_of_core and config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"the method {speculation.method} guesses in the worker that chooses tokens, which is not the one that "
            "reads them if --pipeline-parallel-size is over 1: use the method suffix"
        )
    if draft is not None and speculation is not None:
        _check_division(config.parallel, draft.hf_config)
        config = _with_draft(config, speculation, draft, max_model_len)
    return config.replace(
        model=path,
        dtype=dtype,
        quantization=_quantization(model, kind, hf_config),
        kv_cache_dtype=cache_dtype,
        block_size=config.cache.block_size or default_block,
        max_model_len=max_model_len,
        device=device,
        num_threads=config.device.num_threads or _num_threads(config, machine, serving),
        max_num_batched_tokens=scheduler.max_num_batched_tokens or max(step_tokens, scheduler.max_num_seqs),
        pipeline_depth=_depth(config, device),
    )


def _num_threads(config: EngineConfig, machine: Machine, serving: bool) -> int:
    """The process that serves HTTP needs a core of its own. Machines of a cluster divide what each has themselves."""
    if machine.num_threads:
        return machine.num_threads
    parallel = config.parallel
    num_sharing = 1 if parallel.executor == "ray" else parallel.num_workers * parallel.num_engines
    return max(1, (machine.num_cores - serving) // num_sharing)


def _depth(config: EngineConfig, device: str) -> int:
    """Steps in flight. On a CPU, submit() returns when the step is computed: planning ahead gains nothing."""
    num_stages = config.parallel.pipeline_parallel_size
    return config.scheduler.pipeline_depth or max(num_stages, 2 if device == "cuda" else 1)


def _check_devices(config: EngineConfig, device: str, machine: Machine) -> None:
    parallel = config.parallel
    num_workers = parallel.num_workers * parallel.num_engines
    if device != "cuda" or num_workers <= machine.num_gpus or parallel.executor not in LOCAL_EXECUTORS:
        return
    if parallel.num_engines == 1:
        raise ConfigError(
            f"{num_workers} workers need a GPU each, and there are {machine.num_gpus}: lower --tensor-parallel-size "
            "or --pipeline-parallel-size"
        )
    raise ConfigError(
        f"{parallel.num_engines} engines with {parallel.num_workers} GPUs each need {num_workers}, and there are "
        f"{machine.num_gpus}: lower --data-parallel-size, --tensor-parallel-size or --pipeline-parallel-size"
    )


def _check_division(parallel: ParallelConfig, hf_config: dict[str, Any]) -> None:
    """What can be known before workers build the model, which check it all."""
    if parallel.num_workers == 1:
        return
    architectures = hf_config.get("architectures") or []
    if architectures and registry.find_literal("quire.models", "ARCHITECTURES", architectures) is None:
        raise UnsupportedModelError(
            f"{architectures[0]:.80} has no file of its own here, and is computed by transformers on one device: "
            "leave out --tensor-parallel-size and --pipeline-parallel-size"
        )
    num_heads, num_layers = hf_config.get("num_attention_heads"), hf_config.get("num_hidden_layers")
    num_ranks, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if isinstance(num_heads, int) and num_ranks > num_heads:
        raise UnsupportedModelError(
            f"--tensor-parallel-size {num_ranks} is too many for this model: it has {num_heads} heads to divide"
        )
    if isinstance(num_layers, int) and num_stages > num_layers:
        raise UnsupportedModelError(
            f"the model has {num_layers} layers: --pipeline-parallel-size can be at most {num_layers}"
        )


def _with_draft(config: EngineConfig, speculation: Speculation, draft: DraftFiles, max_model_len: int) -> EngineConfig:
    """With the draft model's path and quantization."""
    length = _max_model_len(None, draft.hf_config)
    if length < max_model_len:
        raise ConfigError(
            f"the draft model has {length} positions, and max_model_len is {max_model_len}: "
            f"add --max-model-len {length}, or choose another draft model"
        )
    model = config.replace(quantization=speculation.quantization).model
    given = config.speculative.speculative_config
    settings = given or {"method": speculation.method, "num_speculative_tokens": speculation.num_tokens}
    found = {"model": draft.path, "quantization": _quantization(model, draft.kind, draft.hf_config)}
    short = {"spec_method": None, "spec_model": None, "spec_tokens": None}
    return config.replace(speculative_config={**settings, **found}, **short)


def _auto_dtype(device: str, hf_config: dict[str, Any]) -> str:
    """Kernels of CPUs, and of packed weights, compute in bfloat16."""
    own = hf_config.get("dtype") or hf_config.get("torch_dtype")
    is_plain = not hf_config.get("quantization_config")
    return "float16" if device == "cuda" and own == "float16" and is_plain else "bfloat16"


def choose_device(asked: str, machine: Machine) -> str:
    if asked == "cuda" and not machine.num_gpus:
        raise ConfigError(f"--device cuda: {machine.gpu_problem or 'there is no NVIDIA GPU, or no driver for it'}")
    if asked == "auto" and machine.gpu_is_broken:
        raise ConfigError(f"the GPU cannot be used: {machine.gpu_problem}, or add --device cpu")
    if asked != "auto":
        return asked
    return "cuda" if machine.num_gpus else "cpu"


def _quantization(model: ModelConfig, kind: str, hf_config: dict[str, Any]) -> str:
    """How weights are kept: as the checkpoint has them, or as the option says.

    Those of a GGUF file stay packed, unless a type is asked for.
    """
    settings = hf_config.get("quantization_config") or {}
    if settings:
        return _own_quantization(model.quantization, str(settings.get("quant_method")))
    if model.quantization == "auto":
        return "gguf" if kind == "gguf" and model.dtype == "auto" else "none"
    if kind == "gguf" and model.quantization in ONLINE_QUANTIZATIONS:
        raise ConfigError(
            f"weights of a .gguf file are quantized already: leave out --quantization {model.quantization}"
        )
    if model.quantization not in ("none", "gguf", *ONLINE_QUANTIZATIONS):
        raise ConfigError(
            f"--quantization {model.quantization} needs a checkpoint quantized like that: leave it out, "
            f"or choose from {', '.join(ONLINE_QUANTIZATIONS)} to quantize while loading"
        )
    if model.quantization == "gguf":
        if kind != "gguf":
            raise ConfigError("quantization gguf needs a .gguf file: leave --quantization out for this model")
        if model.dtype in ("float16", "float32"):
            raise ConfigError(
                f"packed weights compute in bfloat16: leave out --quantization gguf or --dtype {model.dtype}"
            )
    return model.quantization


def _own_quantization(asked: str, own: str) -> str:
    """Of a checkpoint that says how it is quantized."""
    if asked != "auto" and quantization_file(asked) != quantization_file(own):
        raise ConfigError(f"the checkpoint is quantized with {own:.40}: leave out --quantization {asked}")
    known = get_args(Quantization)
    return quantization_file(own) if quantization_file(own) in known else "none"  # the builder refuses others


def _kv_cache_dtype(asked: str, dtype: str, hf_config: dict[str, Any]) -> str:
    """The model's dtype, or "fp8" or "int8"."""
    asked = KV_CACHE_ALIASES.get(asked, asked)
    if asked == "auto":
        return "fp8" if _has_fp8_cache(hf_config.get("quantization_config") or {}) else dtype
    if asked == "fp8_e5m2":
        raise ConfigError(
            "--kv-cache-dtype fp8_e5m2 would keep two bits of each number, and scales make its range useless: use fp8"
        )
    if asked not in (dtype, "fp8", "int8"):
        raise ConfigError(f"the model computes in {dtype}: --kv-cache-dtype is auto, {dtype}, fp8 or int8, not {asked}")
    return asked


def _has_fp8_cache(settings: dict[str, Any]) -> bool:
    """Whether a checkpoint's `quantization_config` says that it was made for a cache in fp8."""
    scheme = settings.get("kv_cache_scheme")
    is_scheme = isinstance(scheme, dict) and scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return is_scheme or settings.get("kv_cache_quant_algo") == "FP8"


def _max_model_len(asked: int | None, hf_config: dict[str, Any]) -> int:
    limit = hf_config.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS
    scaling = hf_config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "dynamic", "yarn") and scaling.get("factor"):
        original = scaling.get("original_max_position_embeddings")
        limit = max(limit, int((original or limit) * scaling["factor"]))
    if asked is not None and asked > limit:
        raise ConfigError(f"max_model_len {asked} is more than the model's {limit} positions: lower --max-model-len")
    return asked or limit
