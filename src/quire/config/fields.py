"""`knob()`: a dataclass field that knows its help text, choices and bounds, and the check that uses them.

Used by every options class; flags.py reads the metadata. Must not know any particular option.
"""

import dataclasses
import sys
import types
import typing
from typing import Any

from quire.errors import ConfigError

NEAR = 0.8  # how alike (difflib) a name must be to be suggested


def resolved(value: int | None) -> int:
    """An option whose None means "auto", read from a config that `resolve.py` has made."""
    if value is None:
        raise ConfigError("this config still says auto: resolve it first")
    return value


def knob(default: Any, help: str, *, low: float | None = None, high: float | None = None, **extra: Any) -> Any:
    """A field with its help text; `low` and `high` are inclusive.

    `extra`: `metavar`, `hidden`, `positional` (True or "?"), `short` (another flag for it), `names` (more of them).
    """
    metadata = {"help": help, "low": low, "high": high, **extra}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(config: Any) -> None:
    """Every value has its field's type, choice and range, else ConfigError; called from `__post_init__`."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            _check_one(field, hints[field.name], getattr(config, field.name))


def default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def unwrap(hint: Any) -> tuple[Any, tuple | None, bool]:
    """(plain type, choices or None, may be None) of a field's annotation."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        optional = len(kinds) < len(typing.get_args(hint))
        hint = kinds[0]
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint), optional
    return hint, None, optional


def _check_type(name: str, kind: type, value: Any) -> None:
    is_stray_bool = isinstance(value, bool) and kind is not bool
    is_right = isinstance(value, (float, int) if kind is float else kind)
    if is_stray_bool or not is_right:
        raise ConfigError(f"{name} must be {_words(kind)}, not {value!r}")
    if kind is float and not abs(value) <= sys.float_info.max:  # NaN compares false; an integer can be larger
        raise ConfigError(f"{name} must be a finite number, not {value!r:.40}")


def _check_one(field: dataclasses.Field, hint: Any, value: Any) -> None:
    kind, choices, optional = unwrap(hint)
    name = field.name
    if value is None and optional:
        return
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return
    _check_type(name, typing.get_origin(kind) or kind, value)
    low, high = field.metadata["low"], field.metadata["high"]
    if low is not None and value < low:
        raise ConfigError(f"{name} must be at least {low:g}, not {value}")
    if high is not None and value > high:
        raise ConfigError(f"{name} must be at most {high:g}, not {value}")


def _words(kind: type) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}
    return {**names, dict: "a JSON object"}[kind]
