"""Formats named on the command line are checked when the model is opened, not when the first request needs them."""

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.frontend.model import ModelInfo


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_a_format_that_does_not_exist_is_refused_at_start_with_those_there_are(tiny_llama, option):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} 'foo': choose from auto, none, .*harmony"):
        ModelInfo.open(EngineConfig.from_kwargs(model=str(tiny_llama), skip_tokenizer_init=True, **{option: "foo"}))


@pytest.mark.parametrize(("name", "file"), [("hermes", "hermes"), ("none", None)])
def test_a_named_format_is_used_whatever_the_template_says(tiny_llama, name, file):
    config = EngineConfig.from_kwargs(model=str(tiny_llama), skip_tokenizer_init=True, tool_call_parser=name)
    module = ModelInfo.open(config).tool_format
    assert (module and module.__name__.rpartition(".")[2]) == file
