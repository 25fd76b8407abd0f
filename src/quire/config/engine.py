"""The engine's options in frozen groups, with vLLM's names where the meaning is the same.

Read by everybody; written by nobody after construction. `None` or "auto" stand for a choice that
`resolve.py` makes once the model and the machine are known.
"""

import dataclasses
import difflib
import logging
import typing
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.fields import NEAR, check, default_of, knob
from quire.config.server import ServerConfig
from quire.config.serving import ServingConfig
from quire.config.speculation import Speculation, read_speculation
from quire.config.vllm import foreign_options, translated
from quire.errors import ConfigError

log = logging.getLogger(__name__)

# Names of quantizations, vLLM's included. Each but auto is a file of quant/, or an alias of one.
Quantization = Literal[
    "auto", "none", "gguf", "fp8", "int8", "int4", "mxfp4", "gpt_oss_mxfp4", "gptq", "gptq_marlin", "gptq_bitblas",
    "awq", "awq_marlin", "cpu_awq", "auto_round", "auto-round", "inc", "compressed-tensors", "compressed_tensors",
    "modelopt", "modelopt_fp4", "bitsandbytes",
]  # fmt: skip
QUANTIZATION_ALIASES = {
    "gpt_oss_mxfp4": "mxfp4", "gptq_marlin": "gptq", "gptq_bitblas": "gptq", "awq_marlin": "awq", "cpu_awq": "awq",
    "inc": "auto_round", "modelopt_fp4": "modelopt",
}  # fmt: skip
# Number types of the KV cache, vLLM's names included.
KVCacheDtype = Literal[
    "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_per_token_head", "int8", "int8_per_token_head",
    "fp8_e5m2",
]  # fmt: skip
KV_CACHE_ALIASES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
ONLINE_QUANTIZATIONS = ("fp8", "int8", "int4", "mxfp4")
LOCAL_EXECUTORS = ("inproc", "multiproc")  # their workers have the GPUs of this machine, in order


def quantization_file(name: str) -> str:
    """The file of quant/ that a name means, given by a user or a checkpoint; there may be none."""
    name = name.replace("-", "_")
    return QUANTIZATION_ALIASES.get(name, name)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its numbers are kept"""

    model: str = knob("smollm2", "name of a built-in model, a Hugging Face folder, a .gguf file, or a hub id")
    tokenizer: str | None = knob(None, "folder or file of another tokenizer (default: the model's own)")
    revision: str | None = knob(None, "hub revision (branch, tag or commit) that every fetched file comes from")
    download_dir: str | None = knob(None, "where files from a hub are kept (default: the hub client's own cache)")
    load_format: Literal["auto", "dummy"] = knob(
        "auto", "dummy: random weights at the shapes of config.json, quantized as it says"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = knob(
        "auto",
        "number type of weights and activations; auto: bfloat16, with quantized weights kept packed; "
        "on GPUs float16 where a checkpoint has it",
    )
    quantization: Quantization = knob(
        "auto",
        "fp8, int8, int4 or mxfp4 round a plain checkpoint's weights while loading; gguf keeps a file's blocks, "
        "none turns them into dtype; another name must be the checkpoint's own; auto goes by checkpoint and dtype",
    )
    max_model_len: int | None = knob(
        None, "longest prompt plus answer, in tokens (default: what the model allows)", low=1
    )
    seed: int = knob(0, "seed for requests that bring none, and for dummy weights", low=0)
    chat_template: str | None = knob(None, "a Jinja template, or a file with one, instead of the model's own")
    chat_template_content_format: Literal["auto", "string", "openai"] = knob(
        "auto", "how the template gets the content of messages: as text, or (openai) as a list of parts; auto finds out"
    )
    skip_tokenizer_init: bool = knob(False, "load no tokenizer: prompts and answers are token ids only")
    default_chat_template_kwargs: dict = knob(
        {}, 'arguments of the chat template where requests bring none, e.g. {"enable_thinking": false}', metavar="JSON"
    )
    override_generation_config: dict = knob(
        {}, 'sampling defaults instead of the model\'s own, e.g. {"temperature": 0.5}', metavar="JSON"
    )
    generation_config: Literal["auto", "none"] = knob(
        "auto", "auto: sampling defaults from the model's generation_config.json; none: OpenAI's defaults"
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache"""

    block_size: int | None = knob(
        None, "tokens per KV block (default: 16; of an 8-bit cache on a GPU 64)", low=1, high=1024
    )
    kv_cache_dtype: KVCacheDtype = knob(
        "auto",
        "number type of cached keys and values: fp8 (fp8_e4m3) and int8 have a scale per token and head; "
        "auto: the model's dtype, or fp8 where the checkpoint was made for it",
    )
    calculate_kv_scales: bool = knob(False, "has no effect: scales that a checkpoint lacks are always computed")
    enable_prefix_caching: bool = knob(True, "reuse the KV blocks of prompts that begin alike")
    gpu_memory_utilization: float = knob(
        0.9,
        "share of the device's memory the engine may use (on a CPU: of what is free, for KV blocks)",
        low=0.01,
        high=1.0,
    )
    kv_cache_memory_bytes: int | None = knob(
        None, "bytes for KV blocks, e.g. 4G (default: from gpu_memory_utilization)", low=1
    )
    num_gpu_blocks_override: int | None = knob(None, "exactly this many KV blocks, for tests and experiments", low=2)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SchedulerConfig:
    """What runs in a step"""

    max_num_seqs: int = knob(256, "requests running at once", low=1, high=65536)
    max_num_batched_tokens: int | None = knob(
        None, "tokens computed in one step (default: on a GPU 8192, on a CPU 2048; when serving 2048 and 512)", low=1
    )
    scheduling_policy: Literal["fcfs", "priority"] = knob("fcfs", "order of requests: by arrival, or by priority first")
    pipeline_depth: int | None = knob(
        None,
        "steps in flight: 1 waits for each, 2 plans ahead; a pipeline has as many as stages (default: by device)",
        low=1,
        high=1024,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can get a token: "
                "raise the one or lower the other"
            )


@dataclass(frozen=True)
class DeviceConfig:
    """Where it runs"""

    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "where to compute; auto: an NVIDIA GPU if there is one, else the CPU"
    )
    num_threads: int | None = knob(
        None,
        "threads for CPU kernels (default: OMP_NUM_THREADS, else the cores it may use, when serving one less)",
        low=1,
    )
    attention_backend: str = knob(
        "auto", "how attention is computed: triton, native, reference, flash_attn or flashinfer; auto: by device"
    )
    interpret_triton: bool = knob(False, "run what GPUs run on a CPU, in Triton's interpreter: for tests", hidden=True)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ParallelConfig:
    """Several devices"""

    tensor_parallel_size: int = knob(1, "devices that divide every layer among them", low=1, high=1024)
    pipeline_parallel_size: int = knob(
        1, "stages that divide the layers among them, one after the other", low=1, high=1024
    )
    enable_expert_parallel: bool = knob(
        False, "divide the experts among the devices of a stage, instead of dividing each expert"
    )
    distributed_executor_backend: str | None = knob(
        None,
        "how the engine reaches its workers: inproc (uni), one in its own process; mp, a process each; ray, on the "
        "machines of a Ray cluster; echo repeats prompts (echo:50: so many steps a second); or the dotted path of a "
        "module (default: mp for several workers)",
    )
    ray_address: str | None = knob(
        None, "host:port of the Ray cluster (default: RAY_ADDRESS, else one on this machine that is started for this)"
    )
    data_parallel_size: int = knob(
        1, "engines behind one server, each with the devices above: requests are divided among them", low=1, high=1024
    )
    data_parallel_backend: Literal["mp", "ray"] = knob(
        "mp", "where the workers of several engines run: in processes on this machine (mp), or on a cluster (ray)"
    )
    data_parallel_rank: int | None = knob(
        None,
        "this server has one of the engines alone, of this number: for a balancer of your own, which knows all servers",
        low=0,
    )
    data_parallel_index: int = knob(0, "which of a server's engines this is: the server says so", low=0, hidden=True)

    def __post_init__(self) -> None:
        check(self)
        self._check_engines()
        if self.executor == "inproc" and self.num_workers > 1:
            raise ConfigError(
                f"{self.num_workers} workers need processes of their own: "
                "leave --distributed-executor-backend out, or say mp"
            )

    def _check_engines(self) -> None:
        size, rank = self.data_parallel_size, self.data_parallel_rank
        if rank is not None and rank >= size:
            raise ConfigError(
                f"data_parallel_rank must be below data_parallel_size ({size}), not {rank}: "
                "it says which of so many servers this is"
            )
        if self.data_parallel_index >= self.num_engines:
            raise ConfigError(
                f"data_parallel_index must be below the number of engines ({self.num_engines}), "
                f"not {self.data_parallel_index}"
            )

    @property
    def num_workers(self) -> int:
        """Of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_engines(self) -> int:
        """That this server starts. With a rank, the others are servers of their own."""
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def first_worker(self) -> int:
        """How many workers the engines before this one have."""
        return self.data_parallel_index * self.num_workers

    @property
    def first_device(self) -> int:
        """Number of the GPU that the engine's first worker has; executors from elsewhere choose for themselves."""
        return self.first_worker if self.executor in LOCAL_EXECUTORS else 0

    @property
    def executor(self) -> str:
        """The file of executor/, and what it is told after a colon; or a dotted path."""
        if self.distributed_executor_backend is None and self.data_parallel_backend == "ray":
            return "ray"
        return self.distributed_executor_backend or ("multiproc" if self.num_workers > 1 else "inproc")


@dataclass(frozen=True)
class StructuredConfig:
    """Answers with a shape"""

    structured_outputs_backend: Literal["auto", "xgrammar", "llguidance"] = knob(
        "auto", "grammar engine; auto: xgrammar, and llguidance for what only that one can do"
    )
    grammar_timeout_s: float = knob(
        10.0, "longest CPU time one grammar or schema may take to compile, in seconds", low=0.1, high=600.0
    )
    tool_call_parser: str = knob(
        "auto",
        "format of tool calls: deepseek_v3, deepseek_v31, ernie45, gemma4, generic_json, glm4, granite, harmony, "
        "hermes, hunyuan, hy_v3, kimi_k2, llama3_json, llama_pythonic, longcat, minimax_m2, mistral, olmo3, phi4, "
        "qwen3_coder, seed_oss or xlam; auto: by the chat template; none: they stay text",
    )
    reasoning_parser: str = knob(
        "auto",
        "how thinking is told from the answer: ernie45, gemma4, granite, harmony, hunyuan, hy_v3, kimi_k2, mistral, "
        "seed_oss or think; auto: by the chat template; none: it is not",
    )
    logits_processors: list[str] = knob([], "your own processors of logits, as package.module:Class", metavar="CLASS")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: more tokens per step, the same tokens"""

    speculative_config: dict | None = knob(
        None,
        'how next tokens are guessed, as JSON with vLLM\'s keys, e.g. {"method": "ngram"}',
        metavar="JSON",
        short="-sc",
    )
    spec_method: str | None = knob(None, "the same as its method")
    spec_model: str | None = knob(None, "the same as its model")
    spec_tokens: int | None = knob(None, "the same as its num_speculative_tokens")

    def __post_init__(self) -> None:
        check(self)
        _ = self.speculation  # mistakes are reported when it is made

    @property
    def speculation(self) -> Speculation | None:
        """What all of these say together; None: no tokens are guessed."""
        short = {"method": self.spec_method, "model": self.spec_model, "num_speculative_tokens": self.spec_tokens}
        settings = {key: value for key, value in short.items() if value is not None}
        if self.speculative_config is None:
            return read_speculation(settings) if settings else None
        if settings:
            raise ConfigError("--speculative-config says it all: leave out --spec-method, --spec-model, --spec-tokens")
        return read_speculation(self.speculative_config)


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine; built flat with `EngineConfig.from_kwargs(model=…, max_num_seqs=…)`."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    structured: StructuredConfig = StructuredConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()

    def __post_init__(self) -> None:
        depth, num_stages = self.scheduler.pipeline_depth, self.parallel.pipeline_parallel_size
        if depth is not None and depth > max(2, num_stages):
            raise ConfigError(f"pipeline_depth must be at most {max(2, num_stages)}, not {depth}")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Options by name; vLLM's become ours (`vllm.py`), and None stands for the default."""
        options = translated(kwargs)
        groups: dict[str, Any] = {}
        known: list[str] = []
        for group_name, group in _GROUPS.items():
            own = dataclasses.fields(group)
            given = {field.name: options.pop(field.name) for field in own if field.name in options}
            for field in own:
                if given.get(field.name, ...) is None and default_of(field) is not None:
                    del given[field.name]
            groups[group_name] = group(**given)
            known += [field.name for field in own]
        _check_unknown(options, known)
        return cls(**groups)

    def replace(self, **kwargs: Any) -> "EngineConfig":
        """A copy with some options changed, given flat."""
        flat: dict[str, Any] = {}
        for group_name in _GROUPS:
            flat |= vars(getattr(self, group_name))
        return EngineConfig.from_kwargs(**{**flat, **kwargs})


def _check_unknown(options: dict[str, Any], known: list[str]) -> None:
    """Options of a server have no effect on an engine alone; others are mistakes."""
    of_servers = {field.name for declaring in (ServerConfig, ServingConfig) for field in dataclasses.fields(declaring)}
    for name in options:
        if name not in of_servers:
            close = difflib.get_close_matches(name, [*known, *foreign_options()], 1, NEAR)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown option {name!r:.80}{hint}")
    given = [name for name, value in options.items() if value is not None]
    if given:
        log.warning("without effect here: %s (an option of quire serve)", ", ".join(given))


_GROUPS: dict[str, type] = typing.get_type_hints(EngineConfig)


def option_classes(options: type) -> list[type]:
    """The classes whose fields are the options: EngineConfig's groups, or the class itself."""
    return list(_GROUPS.values()) if options is EngineConfig else [options]
