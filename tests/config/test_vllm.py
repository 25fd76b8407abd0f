"""Options of vLLM: each is ours, becomes ours, has no effect, or is refused with a reason. None is unknown."""

import argparse
import json
import logging
from pathlib import Path

import pytest

from quire import registry
from quire.api.cli import parser
from quire.config import EngineConfig
from quire.config.flags import Parser, add_flags, from_args, rewritten, whole
from quire.config.server import ServerConfig
from quire.config.serving import ServingConfig
from quire.config.vllm import VALUES, foreign_options
from quire.errors import ConfigError
from tests.config.from_vllm import PAGE, page

OPTIONS = json.loads((Path(__file__).parents[1] / "data" / "vllm_options.json").read_text())


def serve(*words: str) -> dict:
    """What is read of a command line."""
    found = parser(["serve"]).parse_args(["serve", *words])
    return {name: value for name, value in vars(found).items() if name != "run"}


def actions() -> dict:
    found = Parser(prog="quire serve")
    for options in (ServerConfig, ServingConfig, EngineConfig):
        add_flags(found, options)
    found.add_argument("name", nargs="?")
    found.add_argument("--config")
    return found._option_string_actions


def test_every_flag_of_vllm_means_something():
    known = actions()
    missing = [flag for option in OPTIONS.values() for flag in option["flags"] if flag not in known]
    assert missing == []


def test_every_switch_of_vllm_can_be_turned_off():
    known = actions()
    switches = [name for name, option in OPTIONS.items() if option["kind"] == "switch" and name != "hf_token"]
    missing = [name for name in switches if "--no-" + name.replace("_", "-") not in known]
    assert missing == [] and len(switches) > 80


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option["is_keyword"]])
def test_every_keyword_is_accepted_with_the_value_it_has_in_vllm_by_default(name):
    """A program that writes defaults out works unchanged."""
    if name not in ("model", "gpu_memory_utilization", "block_size"):
        EngineConfig.from_kwargs(**{name: OPTIONS[name]["default"]})


def test_a_command_line_written_for_vllm_is_understood(caplog):
    line = (
        "some/model --tensor-parallel-size 1 -pp 1 --enforce-eager --trust_remote_code --max_model_len 8k "
        "--dtype half --enable-auto-tool-choice --tool-call-parser pythonic --reasoning-parser deepseek_r1 "
        "--swap-space 4 --disable-log-requests --gpu-memory-utilization 0.5 --generation-config vllm "
        "--attention-backend FLASH_ATTN --load-format safetensors --no-enable-prefix-caching -O3 "
        "--compilation-config.cudagraph_mode FULL --cudagraph-capture-sizes 1 2 4 --served-model-name a b "
        "--enable-log-requests --disable-uvicorn-access-log --uvicorn-log-level warning"
    )
    with caplog.at_level(logging.WARNING):
        found = serve(*line.split())
    expected = {
        "name": "some/model", "max_model_len": 8000, "dtype": "float16", "tool_call_parser": "llama_pythonic",
        "reasoning_parser": "think", "gpu_memory_utilization": 0.5, "generation_config": "none",
        "attention_backend": "auto", "load_format": "auto", "enable_prefix_caching": False,
        "served_model_name": ["a", "b"], "log_requests": True, "access_log": False, "log_level": "warning",
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
    }  # fmt: skip
    assert found == expected
    for word in ("enforce_eager", "trust_remote_code", "swap_space", "cudagraph_capture_sizes", "disable_log_requests"):
        assert word in caplog.text
    assert "tensor_parallel_size" not in caplog.text  # 1 is what is done anyway


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--api-key secret org/name", {"api_key": ["secret"], "name": "org/name"}),
        ("--served-model-name a org/name", {"served_model_name": ["a"], "name": "org/name"}),
        ("org/name --served-model-name a b", {"served_model_name": ["a", "b"], "name": "org/name"}),
        ("org/name --api-key a b --port 1", {"api_key": ["a", "b"], "name": "org/name", "port": 1}),
        ("--seed 3 org/name --api-key=a", {"seed": 3, "name": "org/name", "api_key": ["a"]}),
        ("--cudagraph-capture-sizes 1 org/name", {"name": "org/name"}),
        ("--max-model-len -1", {"max_model_len": None}),
        ('--allowed-origins ["*"] org/name', {"allowed_origins": ["*"], "name": "org/name"}),
        ("--max-model-len auto", {"max_model_len": None}),
        ("--speculative-config.method ngram -sc.num_speculative_tokens=3", {}),
    ],
)
def test_a_list_never_takes_the_model(words, expected):
    found = serve(*words.split())
    if not expected:
        expected = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert found == expected


@pytest.mark.parametrize(
    "options, words",
    [
        ({"data_parallel_size_local": 2}, "a server starts all engines"),
        ({"data_parallel_external_lb": True}, "--data-parallel-rank"),
        ({"decode_context_parallel_size": 2}, "use -tp, -pp and -dp"),
        ({"nnodes": 2}, "several machines are a Ray cluster"),
        ({"headless": True}, "several machines are a Ray cluster"),
        ({"enable_lora": True}, "adapters"),
        ({"hf_overrides": {"a": 1}}, "config.json"),
        ({"runner": "pooling"}, "vectors"),
        ({"max_model_length": 5}, "did you mean 'max_model_len'"),
        ({"compilation_configuration": 5}, "compilation_config"),
        ({"temperature": 5}, "unknown option 'temperature'$"),
        ({"structured_outputs_config": {"backend": "auto", "disable_fallback": True}}, "disable_fallback"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_reason(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_kwargs(**options)


def test_a_wrong_flag_shows_the_right_help_and_what_is_near():
    with pytest.raises(ConfigError, match=r"there is no flag --max-model-length: did you mean --max-model-len\? "):
        serve("--max-model-length", "5")
    with pytest.raises(ConfigError, match=r"there is no flag --colour \(see quire serve --help\)"):
        serve("--colour", "red")
    with pytest.raises(ConfigError, match="unrecognized argument 'b'"):
        serve("a", "b")


def test_keywords_of_a_server_have_no_effect_on_an_engine_alone(caplog):
    config = EngineConfig.from_kwargs(served_model_name="a", max_logprobs=20, quantization=None, kv_cache_dtype="auto")
    assert config == EngineConfig()
    assert "served_model_name" in caplog.text


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--device-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--max-num-queued-reqs 5", {"max_queued_requests": 5}),
        ('--structured-outputs-config {"backend":"guidance"}', {"structured_outputs_backend": "llguidance"}),
        ("--structured-outputs-config.backend xgrammar", {"structured_outputs_backend": "xgrammar"}),
        (
            "--otlp-traces-endpoint grpc://a:4317 --collect-detailed-traces all",
            {"otlp_traces_endpoint": "grpc://a:4317"},
        ),
        ("--distributed-executor-backend uni", {"distributed_executor_backend": "inproc"}),
    ],
)
def test_other_names_take_the_values_of_our_options(words, expected):
    assert serve(*words.split()) == expected


def test_a_programs_own_parser_takes_vllms_flags_too():
    own = argparse.ArgumentParser()
    add_flags(own, EngineConfig)
    found = from_args(EngineConfig, own.parse_args(["--device-memory-utilization", "0.5", "--enforce-eager"]))
    assert found == EngineConfig.from_kwargs(gpu_memory_utilization=0.5)


def test_none_stands_for_the_default():
    assert EngineConfig.from_kwargs(seed=None, dtype=None, max_num_seqs=None) == EngineConfig()


def test_two_names_of_one_option_are_refused():
    with pytest.raises(ConfigError, match="is another name of gpu_memory_utilization"):
        EngineConfig.from_kwargs(gpu_memory_utilization=0.5, device_memory_utilization=0.5)


def test_words_for_values_are_values_of_ours():
    from quire.config.engine import ModelConfig

    assert {own for own in VALUES["dtype"].values()} <= {"float16", "float32"}
    assert ModelConfig(load_format=VALUES["load_format"]["safetensors"]).load_format == "auto"
    formats = {"tool_call_parser": "quire.frontend.tools", "reasoning_parser": "quire.frontend.reasoning"}
    for option, folder in formats.items():
        assert set(VALUES[option].values()) <= set(registry.names(folder))
        assert not set(VALUES[option]) & set(registry.names(folder)), "a format of that name is there now"


def test_no_option_is_ours_and_foreign():
    own = {action.dest for action in actions().values() if action.help != "==SUPPRESS=="}
    assert not own & set(foreign_options())


@pytest.mark.parametrize("text, value", [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("-1", -1)])
def test_whole_numbers(text, value):
    assert whole(text) == value


@pytest.mark.parametrize("words", [["--"], ["-"], ["--x"], ["--api-key"], ["--a.b"], ["-O"], ["--=", "x"]])
def test_odd_words_are_left_to_argparse(words):
    assert rewritten(words, {})


def test_the_page_for_vllms_users_is_what_the_table_says():
    assert PAGE.read_text() == page(), "run: python -m tests.config.from_vllm"


@pytest.mark.parametrize(
    "option, folder",
    [
        ("tool_call_parser", "quire.frontend.tools"),
        ("reasoning_parser", "quire.frontend.reasoning"),
        ("attention_backend", "quire.layers.attention"),
    ],
)
def test_help_lists_what_can_be_chosen(option, folder):
    text = actions()["--" + option.replace("_", "-")].help
    assert [name for name in registry.names(folder) if name not in text] == []
