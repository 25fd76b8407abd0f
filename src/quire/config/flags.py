"""Command-line flags generated from options classes: one knob, one flag, one line of help.

Used by every command of the CLI, and by programs that want the engine's flags beside their own (examples/own_flags.py).
An options class is a dataclass whose fields are `knob()`s; its docstring heads its section in --help.
"""

import argparse
import dataclasses
import json
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from quire.config.engine import EngineConfig, option_classes
from quire.config.fields import default_of, unwrap
from quire.errors import ConfigError

Options = TypeVar("Options")

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Parser(argparse.ArgumentParser):
    """Reads flags; mistakes become ConfigError, so that they are reported like any other error of a command."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> typing.NoReturn:
        if message.startswith("unrecognized arguments:") and not message.split()[2].startswith("-"):
            message += ": a flag takes one value; where it can have several, give it several times"
        raise ConfigError(f"{message} (see {self.prog} --help)")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """Adds the flags of an options class, in a section of its own; EngineConfig brings its groups."""
    for declaring in option_classes(options):
        section = parser.add_argument_group((declaring.__doc__ or declaring.__name__).strip().splitlines()[0])
        hints = typing.get_type_hints(declaring)
        for field in dataclasses.fields(declaring):
            if "help" in field.metadata and not field.metadata.get("hidden"):
                _add_flag(section, field, hints[field.name])


def from_args(options: type[Options], args: argparse.Namespace) -> Options:
    """The options class filled from parsed flags; flags of other classes are ignored."""
    build: Callable[..., Any] = EngineConfig.from_kwargs if options is EngineConfig else options
    names = {field.name for declaring in option_classes(options) for field in dataclasses.fields(declaring)}
    return build(**{name: value for name, value in vars(args).items() if name in names})


def _add_flag(section: Any, field: dataclasses.Field, hint: Any) -> None:
    kind, choices, _ = unwrap(hint)
    default = default_of(field)
    text = field.metadata["help"].replace("%", "%%")
    # Only what was typed ends up in the namespace: defaults stay with the class.
    common: dict[str, Any] = {"default": argparse.SUPPRESS}
    if default not in (None, "", [], False) and "default:" not in text:
        text += f" (default: {'on' if default is True else default})"
    common["help"] = text
    if positional := field.metadata.get("positional"):
        if choices is not None:
            common["choices"] = choices
        section.add_argument(
            field.name,
            nargs=None if positional is True else positional,
            metavar=field.metadata.get("metavar"),
            **common,
        )
        return
    name = "--" + field.name.replace("_", "-")
    if kind is bool:
        section.add_argument(name, action=argparse.BooleanOptionalAction if default else "store_true", **common)
        return
    common["metavar"] = field.metadata.get("metavar") or _metavar(kind)
    if choices is not None:
        common |= {"choices": choices, "metavar": "{" + ",".join(choices) + "}"}
    elif typing.get_origin(kind) is list:
        # One value each time the flag is given. If it took several at once, it would take a MODEL that follows, too.
        common |= {"action": "append", "type": reader(typing.get_args(kind)[0], field.name)}
    else:
        common["type"] = reader(kind, field.name)
    section.add_argument(name, *filter(None, [field.metadata.get("short")]), **common)


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def reader(kind: type, name: str) -> Callable[[str], Any]:
    """The function that turns a word of the command line into a field's value."""
    if kind is dict:
        return json_object
    return size if kind is int and name.endswith("_bytes") else kind


def json_object(text: str) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON object: write '{{\"key\": value}}'")
    return found


def size(text: str) -> int:
    """Bytes from 512, 4G, 4GiB, 1.5g: powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512M or 4G")
    return int(float(match[1]) * _SIZES[match[2]])
