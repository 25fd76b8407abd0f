"""EngineArgs and AsyncEngineArgs: options in one flat object, by vLLM's names for such objects.

For programs that collect options before they make an `LLM` or an `AsyncLLM`; they are dataclasses, so that
`LLM(**asdict(args))` works. What the options are is declared in `engine.py` and `serving.py`.
"""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig, option_classes
from quire.config.flags import add_flags, from_args
from quire.config.serving import ServingConfig


def _names(options: type) -> list[str]:
    return [field.name for group in option_classes(options) for field in dataclasses.fields(group)]


def _flat(config: Any) -> dict[str, Any]:
    """Name -> value of all options of a config, or of its groups."""
    groups = [getattr(config, field.name) for field in dataclasses.fields(config)]
    parts = groups if isinstance(config, EngineConfig) else [config]
    return {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}


class EngineArgs:
    """`EngineArgs(model="smollm2", max_model_len=512)`: options of an engine, as `LLM` takes them."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._set(EngineConfig.from_kwargs(model=model, **options))

    def _set(self, *configs: Any) -> None:
        for config in configs:
            vars(self).update(_flat(config))

    def create_engine_config(self) -> EngineConfig:
        return EngineConfig.from_kwargs(**{name: getattr(self, name) for name in _names(EngineConfig)})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """A flag for each option."""
        add_flags(parser, EngineConfig)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        made = cls.__new__(cls)
        made._set(from_args(EngineConfig, args))
        return made

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class AsyncEngineArgs(EngineArgs):
    """EngineArgs, and the options of an engine that serves many: `AsyncEngineArgs(…, max_queued_requests=64)`."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        serving = {name: options.pop(name, None) for name in _names(ServingConfig)}
        given = {name: value for name, value in serving.items() if value is not None}
        self._set(EngineConfig.from_kwargs(model=model, **options), ServingConfig(**given))

    def create_serving_config(self) -> ServingConfig:
        return ServingConfig(**{name: getattr(self, name) for name in _names(ServingConfig)})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_flags(parser, EngineConfig)
        add_flags(parser, ServingConfig)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "AsyncEngineArgs":
        made = cls.__new__(cls)
        made._set(from_args(EngineConfig, args), from_args(ServingConfig, args))
        return made


def _declare(kind: type, *configs: type) -> None:
    """Makes fields of all options."""
    kind.__annotations__ = {name: Any for config in configs for name in _names(config)}
    dataclasses.dataclass(init=False)(kind)


_declare(EngineArgs, EngineConfig)
_declare(AsyncEngineArgs, EngineConfig, ServingConfig)
