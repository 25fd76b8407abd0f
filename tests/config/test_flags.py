"""Options: declared once, checked, and turned into flags and keywords."""

import dataclasses
import math

import pytest

from quire.config import EngineConfig, SchedulerConfig, knob, quantization_file
from quire.config.flags import Parser, add_flags, from_args, size
from quire.config.resolve import Machine, resolve
from quire.errors import ConfigError, UnsupportedModelError

HF = {"max_position_embeddings": 4096}
CPU, GPU = Machine(num_cores=2), Machine(num_cores=2, num_gpus=1)


def parse(*argv: str) -> EngineConfig:
    parser = Parser()
    add_flags(parser, EngineConfig)
    return from_args(EngineConfig, parser.parse_args(argv))


def every_field():
    return [f for g in dataclasses.fields(EngineConfig) for f in dataclasses.fields(g.type)]


def test_every_option_has_a_flag_and_a_help_text():
    parser = Parser()
    add_flags(parser, EngineConfig)
    text = parser.format_help()
    for field in every_field():
        assert ("--" + field.name.replace("_", "-") in text) != field.metadata.get("hidden", False)
        assert len(field.metadata["help"]) > 10


def test_flags_and_keywords_give_the_same_config():
    flags = parse(
        "--max-num-seqs", "8", "--no-enable-prefix-caching", "--dtype", "float32", "--kv-cache-memory-bytes", "1.5G"
    )
    words = EngineConfig.from_kwargs(
        max_num_seqs=8, enable_prefix_caching=False, dtype="float32", kv_cache_memory_bytes=3 << 29
    )
    assert flags == words


def test_what_is_not_typed_keeps_its_default():
    assert parse() == EngineConfig()


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().model.seed = 3


def test_replace_changes_one_option_and_keeps_the_rest():
    config = EngineConfig.from_kwargs(max_num_seqs=7).replace(block_size=32)
    assert (config.scheduler.max_num_seqs, config.cache.block_size) == (7, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_nun_seqs": 4}, "did you mean 'max_num_seqs'"),
        ({"dtype": "float8"}, "one of auto, bfloat16, float16, float32"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_seqs": 2.5}, "a whole number"),
        ({"max_num_seqs": True}, "a whole number"),
        ({"gpu_memory_utilization": math.nan}, "finite"),
        ({"gpu_memory_utilization": 10**400}, "finite"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"max_model_len": -2}, "at least 1"),
        ({"model": 3}, "text"),
        ({"enable_prefix_caching": "yes"}, "true or false"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "at least max_num_seqs"),
        ({"pipeline_depth": 3}, "at most 2"),
    ],
)
def test_bad_options_say_what_is_wrong(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_kwargs(**options)


@pytest.mark.parametrize(
    "argv", [["--dtype", "int3"], ["--max-num-seqs", "many"], ["--nonsense"], ["--kv-cache-memory-bytes", "lots"]]
)
def test_bad_flags_raise_config_errors(argv):
    with pytest.raises(ConfigError):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("4k", 4096), ("2MiB", 2 << 20), ("1.5g", 3 << 29), ("1TB", 1 << 40)]
)
def test_sizes(text, value):
    assert size(text) == value


def test_resolving_leaves_nothing_automatic():
    config = resolve(EngineConfig(), "/m", "gguf", HF, CPU)
    assert config.model.dtype == "bfloat16" and config.model.quantization == "gguf"
    assert config.model.max_model_len == 4096 and config.device.num_threads == 2
    stay_auto = ("load_format", "generation_config", "attention_backend", "chat_template_content_format")
    for group in (config.model, config.cache, config.scheduler, config.device):
        for field in dataclasses.fields(group):
            if field.name not in stay_auto:
                assert getattr(group, field.name) != "auto", field.name
    assert resolve(config, "/m", "gguf", HF, CPU) == config


def test_explicit_dtypes_dequantize():
    for dtype in ("float32", "bfloat16"):
        assert resolve(EngineConfig.from_kwargs(dtype=dtype), "/m", "gguf", HF, CPU).model.quantization == "none"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"quantization": "gguf"}, "hf"),
        ({"quantization": "gguf", "dtype": "float32"}, "gguf"),
        ({"max_model_len": 5000}, "hf"),
    ],
)
def test_contradictions_are_refused(options, kind):
    with pytest.raises(ConfigError):
        resolve(EngineConfig.from_kwargs(**options), "/m", kind, HF, CPU)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("inc", "auto-round"),
        ("cpu_awq", "awq"),
        ("gptq_bitblas", "gptq"),
        ("gpt_oss_mxfp4", "mxfp4"),
        ("modelopt_fp4", "modelopt"),
    ],
)
def test_vllms_names_mean_the_checkpoints_quantization(name, own):
    asked = EngineConfig.from_kwargs(quantization=name)
    quantized = {**HF, "quantization_config": {"quant_method": own}}
    assert resolve(asked, "/m", "hf", quantized, CPU).model.quantization == quantization_file(own)
    with pytest.raises(ConfigError, match="needs a checkpoint quantized like that"):
        resolve(asked, "/m", "hf", HF, CPU)


def test_the_context_grows_with_rope_scaling():
    hf = {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert resolve(EngineConfig(), "/m", "hf", hf, CPU).model.max_model_len == 16384


def test_max_num_batched_tokens_covers_every_row_by_default():
    assert (
        resolve(EngineConfig.from_kwargs(max_num_seqs=5000), "/m", "hf", HF, CPU).scheduler.max_num_batched_tokens
        == 5000
    )
    with pytest.raises(ConfigError):
        SchedulerConfig(max_num_seqs=5000, max_num_batched_tokens=2048)


def test_a_program_adds_its_own_flags():
    @dataclasses.dataclass(frozen=True)
    class Mine:
        """Mine"""

        colour: str = knob("red", "which colour")
        loud: bool = knob(False, "be loud")

    parser = Parser()
    add_flags(parser, Mine)
    add_flags(parser, EngineConfig)
    args = parser.parse_args(["--colour", "blue", "--loud", "--seed", "5"])
    assert from_args(Mine, args) == Mine("blue", True)
    assert from_args(EngineConfig, args).model.seed == 5


def test_a_gpu_is_used_unless_told_otherwise():
    found = resolve(EngineConfig(), "/m", "gguf", HF, GPU)
    assert (found.device.device, found.scheduler.pipeline_depth, found.scheduler.max_num_batched_tokens) == (
        "cuda",
        2,
        8192,
    )
    assert found.model.quantization == "gguf"
    assert resolve(EngineConfig.from_kwargs(dtype="bfloat16"), "/m", "gguf", HF, GPU).model.quantization == "none"
    told = resolve(EngineConfig.from_kwargs(device="cpu"), "/m", "gguf", HF, GPU)
    assert told == resolve(EngineConfig(), "/m", "gguf", HF, CPU)


@pytest.mark.parametrize(
    ("machine", "fields", "expected"),
    [
        (GPU, {"torch_dtype": "float16"}, "float16"),
        (GPU, {"dtype": "float16"}, "float16"),
        (GPU, {"dtype": "float32"}, "bfloat16"),
        (GPU, {"dtype": "float16", "quantization_config": {"quant_method": "awq"}}, "bfloat16"),
        (CPU, {"dtype": "float16"}, "bfloat16"),
    ],
)
def test_gpus_keep_float16(machine, fields, expected):
    assert resolve(EngineConfig(), "/m", "hf", {**HF, **fields}, machine).model.dtype == expected
    assert resolve(EngineConfig.from_kwargs(dtype="float16"), "/m", "hf", HF, machine).model.dtype == "float16"


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        (CPU, {}, 16),
        (CPU, {"kv_cache_dtype": "int8"}, 16),
        (GPU, {}, 16),
        (GPU, {"kv_cache_dtype": "fp8"}, 64),
        (GPU, {"kv_cache_dtype": "fp8", "block_size": 32}, 32),
    ],
)
def test_blocks_of_8_bit_caches_on_gpus_are_larger(machine, options, expected):
    assert resolve(EngineConfig.from_kwargs(**options), "/m", "hf", HF, machine).cache.block_size == expected


LLAMA = HF | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "num_hidden_layers": 4}
BLOOM = HF | {"architectures": ["BloomForCausalLM"], "num_attention_heads": 16, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("options", "hf_config", "sentence"),
    [
        ({"tensor_parallel_size": 100}, LLAMA, "size 100 is too many for this model: it has 9 heads"),
        ({"pipeline_parallel_size": 5}, LLAMA, "has 4 layers: --pipeline-parallel-size can be at most 4"),
        ({"tensor_parallel_size": 2}, BLOOM, "BloomForCausalLM has no file of its own here"),
        ({"pipeline_parallel_size": 2}, BLOOM, "leave out --tensor-parallel-size and --pipeline-parallel-size"),
    ],
)
def test_what_no_worker_can_build_is_refused_before_any_is_started(options, hf_config, sentence):
    with pytest.raises(UnsupportedModelError, match=sentence):
        resolve(EngineConfig.from_kwargs(**options), "/m", "hf", hf_config, CPU)
    fitting = {"tensor_parallel_size": 9, "pipeline_parallel_size": 4}
    assert resolve(EngineConfig.from_kwargs(**fitting), "/m", "hf", LLAMA, CPU).parallel.num_workers == 36


@pytest.mark.parametrize(
    "flags",
    [
        ["--executor", "echo:50", "--distributed-executor-backend", "mp"],
        ["--distributed-executor-backend", "mp", "--executor", "echo:50"],
    ],
)
def test_an_executor_is_named_once(flags):
    with pytest.raises(ConfigError, match="executor is another name of distributed_executor_backend: give one of them"):
        parse(*flags)


@pytest.mark.parametrize("flags", [["--nnodes", "2"], ["--node-rank", "1"], ["-r", "1"], ["--headless"]])
def test_machines_are_those_of_a_cluster(flags):
    with pytest.raises(ConfigError, match="--distributed-executor-backend ray"):
        parse(*flags)
    assert parse("--nnodes", "1", "--node-rank", "0") == EngineConfig()


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        (CPU, "no NVIDIA GPU"),
        (Machine(2, 0, "the installed torch is a CPU build"), "CPU build"),
        (Machine(2, 0, "error 999", True), "error 999"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(machine, word):
    with pytest.raises(ConfigError, match=word):
        resolve(EngineConfig.from_kwargs(device="cuda"), "/m", "hf", HF, machine)


def test_a_card_that_stopped_answering_is_not_passed_over():
    broken = Machine(2, 0, "the NVIDIA driver answers with error 999: see nvidia-smi", gpu_is_broken=True)
    with pytest.raises(ConfigError, match="error 999.*--device cpu"):
        resolve(EngineConfig(), "/m", "hf", HF, broken)
    assert resolve(EngineConfig.from_kwargs(device="cpu"), "/m", "hf", HF, broken).device.device == "cpu"
