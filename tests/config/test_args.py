"""EngineArgs and AsyncEngineArgs: every option once, flat, with the checks of the configs they make."""

import dataclasses

import pytest

from quire import AsyncEngineArgs, EngineArgs, EngineConfig
from quire.config import ServingConfig
from quire.config.flags import Parser
from quire.errors import ConfigError


def test_args_hold_every_option_and_make_the_config_again():
    args = EngineArgs(model="m", max_model_len=512, enable_prefix_caching=False)
    flat = dataclasses.asdict(args)
    assert (flat["model"], flat["max_model_len"], flat["max_num_seqs"]) == ("m", 512, 256)
    assert EngineConfig.from_kwargs(**flat) == args.create_engine_config()
    assert args == EngineArgs(**flat) != EngineArgs(model="m")
    assert "max_model_len=512" in repr(args)


def test_an_option_may_be_changed_before_the_config_is_made():
    args = EngineArgs("m")
    args.max_num_seqs = 7
    assert args.create_engine_config().scheduler.max_num_seqs == 7


def test_a_wrong_option_is_reported_where_it_is_written():
    with pytest.raises(ConfigError, match="did you mean"):
        EngineArgs(model="m", max_num_seq=3)
    with pytest.raises(ConfigError):
        AsyncEngineArgs(model="m", max_queued_requests=0)


def test_async_args_hold_what_serving_needs():
    args = AsyncEngineArgs(model="m", max_logprobs=-1, max_n=4)
    assert args.create_serving_config() == ServingConfig(max_logprobs=-1, max_n=4)
    assert args.create_engine_config() == EngineConfig.from_kwargs(model="m")
    assert AsyncEngineArgs(**dataclasses.asdict(args)) == args


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_args_come_from_a_command_line(kind):
    parser = kind.add_cli_args(Parser())
    args = kind.from_cli_args(parser.parse_args(["--model", "m", "--max-model-len", "64"]))
    assert args == kind(model="m", max_model_len=64)
