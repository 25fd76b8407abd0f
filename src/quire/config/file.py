"""Options from a YAML file, by the names of their flags: what `quire serve --config FILE` reads.

The file is a flat mapping (`max-model-len: 4096` or `max_model_len: 4096`). The caller lets flags of the command line
override it.
"""

import argparse
import difflib
import os
import typing
from collections.abc import Iterable
from typing import Any

from quire.config.engine import option_classes
from quire.config.fields import NEAR, unwrap
from quire.config.flags import reader
from quire.config.vllm import foreign_options, translated
from quire.errors import ConfigError
from quire.utils.files import read_file

_MAX_BYTES = 1 << 18


def read_options(path: str, options: Iterable[type]) -> dict[str, Any]:
    """Field name -> value, for the fields of these options classes; values are checked where the classes are built."""
    kinds = _kinds(options)
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).lstrip("-").replace("-", "_")
        if name not in kinds and name not in foreign_options():
            close = difflib.get_close_matches(name, kinds, 1, NEAR)
            hint = f": did you mean {close[0].replace('_', '-')!r}?" if close else ""
            raise ConfigError(f"{path}: unknown option {key!r:.100}{hint}")
        if name in values:
            raise ConfigError(f"{path}: {key!r} is there twice, in two spellings")
        if value is not None:
            values[name] = _value(path, name, kinds[name], value) if name in kinds else value
    return translated(values)


def _kinds(options: Iterable[type]) -> dict[str, Any]:
    """Field name -> plain type of every option."""
    kinds: dict[str, Any] = {}
    for each in options:
        for declaring in option_classes(each):
            kinds |= {name: unwrap(hint)[0] for name, hint in typing.get_type_hints(declaring).items()}
    return kinds


def _value(path: str, name: str, kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is list:
        return value if isinstance(value, list) else [value]
    if kind is int and isinstance(value, str):  # 4G
        try:
            return reader(kind, name)(value)
        except (ValueError, argparse.ArgumentTypeError):
            raise ConfigError(f"{path}: {name} cannot be {value!r:.100}") from None
    return value


def _mapping(path: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError("--config needs PyYAML: pip install pyyaml") from None
    try:
        content = yaml.safe_load(read_file(os.path.expanduser(path), _MAX_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"the config file {path!r} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8, a day such as 2020-99-99
        mark = getattr(error, "problem_mark", None)
        where = f": see line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path} is no valid YAML{where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold option names and values, as in: max-model-len: 4096")
    return content
