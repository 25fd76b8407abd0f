"""Command-line flags generated from options classes: one knob, one flag, one line of help.

Used by every command of the CLI, and by programs that want the engine's flags beside their own (examples/own_flags.py).
An options class is a dataclass whose fields are `knob()`s; its docstring heads its section in --help.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import re
import sys
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.config.engine import EngineConfig, option_classes
from quire.config.fields import NEAR, default_of, unwrap
from quire.config.server import ServerConfig
from quire.config.serving import ServingConfig
from quire.config.vllm import JSON_ALIASES, SHORT, foreign_options, own_value, translated
from quire.errors import ConfigError

Options = TypeVar("Options")

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Parser(argparse.ArgumentParser):
    """Reads flags; mistakes become ConfigError, so that they are reported like any other error of a command.

    Flags may be written with underscores. vLLM's that are not ours are translated (`vllm.py`).
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(rewritten(words, self._option_string_actions), namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return argparse.Namespace(**translated(vars(found))), []

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unrecognized argument {word!r:.80}: a flag takes one value; give it again for another"
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, 1, NEAR)
        return f"there is no flag {flag:.80}" + (f": did you mean {near[0]}?" if near else "")


def rewritten(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The words of a command line as argparse reads them: flags first, then the others.

    Underscores in names become dashes, `--name.key VALUE` becomes a part of the JSON of `--name`, and of a flag that
    takes several values each gets its own: all that follow if MODEL came before, else the first, so that a MODEL that
    follows is never taken for a value.
    """
    found: list[str] = []
    others: list[str] = []  # together: argparse gives MODEL and PROMPT nothing more once a flag was between them
    parts: dict[str, dict[str, Any]] = {}  # flag -> its JSON
    model_came = False
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        if re.fullmatch(r"-O\d", word):
            word = f"--optimization-level={word[2:]}"
        if word == "--":
            others += [word, *waiting]
            break
        if not re.match(r"--?[A-Za-z]", word):
            model_came = True
            others.append(word)
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        base, dot, key = name.partition(".")
        action = actions.get(name)
        if dot and base in actions:
            value = value if equals or not waiting else waiting.popleft()
            _put(parts.setdefault(actions[base].option_strings[0], {}), key.replace("-", "_").split("."), value)
        elif isinstance(action, _EachOwn) and not equals:
            values = [waiting.popleft()] if waiting else []
            while model_came and waiting and not waiting[0].startswith("-"):
                values.append(waiting.popleft())
            found += [part for value in values for part in (name, value)] or [name]
        else:
            found.append(name + equals + value)
            if action is not None and action.nargs is None and not equals and waiting:
                found.append(waiting.popleft())
    return found + [f"{name}={json.dumps(content)}" for name, content in parts.items()] + others


def _put(content: dict[str, Any], keys: list[str], text: str) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    try:
        content[keys[-1]] = json.loads(text)
    except (ValueError, RecursionError):
        content[keys[-1]] = text


class _EachOwn(argparse._AppendAction):
    """A flag that may be given several times, each time with one value, or with a JSON list of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for value in _json_texts(values):
            super().__call__(parser, namespace, value, option_string)


def _json_texts(value: Any) -> list[Any]:
    """The texts of a JSON list; what is none is one text."""
    found: Any = None
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(value)
    is_texts = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found if is_texts else [value]


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
    if options is EngineConfig:
        _add_foreign(parser)


def _add_foreign(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags that are not ours; --help does not show them."""
    short_of = {name: short for short, name in SHORT.items()}
    known = parser._option_string_actions
    for entry in foreign_options().values():
        names = ["--" + entry.name.replace("_", "-"), short_of.get(entry.name, "")]
        names = [name for name in names if name and name not in known]
        common: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if not names or not names[0].startswith("--"):
            continue  # a flag of ours by now
        if entry.kind == "switch":
            parser.add_argument(*names, action="store_true", **common)
            parser.add_argument("--no-" + names[0][2:], action="store_false", **common)
        else:
            if entry.becomes and entry.name not in JSON_ALIASES:
                common["type"] = _reader_of(entry.becomes)
            parser.add_argument(*names, action=_EachOwn if entry.kind == "list" else "store", **common)


def _reader_of(name: str) -> Callable[[str], Any]:
    """Of an option, whichever class declares it."""
    for options in (EngineConfig, ServerConfig, ServingConfig):
        for declaring in option_classes(options):
            if name in (hints := typing.get_type_hints(declaring)):
                return reader(unwrap(hints[name])[0], name)
    raise ConfigError(f"there is no option {name}")


def from_args(options: type[Options], args: argparse.Namespace) -> Options:
    """The options class filled from parsed flags; flags of other classes are ignored."""
    build: Callable[..., Any] = EngineConfig.from_kwargs if options is EngineConfig else options
    names = {field.name for declaring in option_classes(options) for field in dataclasses.fields(declaring)}
    given = translated(vars(args))  # a program's own parser leaves vLLM's options as they are
    return build(**{name: value for name, value in given.items() if name in names})


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
        _add_switch(section, [name, *_short(field)], bool(default), common)
        return
    common["metavar"] = field.metadata.get("metavar") or _metavar(kind)
    common["type"] = reader(kind, field.name)
    if choices is not None:
        common |= {"choices": choices, "metavar": "{" + ",".join(choices) + "}"}
    elif typing.get_origin(kind) is list:
        common |= {"action": _EachOwn, "type": reader(typing.get_args(kind)[0], field.name)}
    section.add_argument(name, *_short(field), **common)


def _short(field: dataclasses.Field) -> list[str]:
    """Its other flags."""
    own = [field.metadata["short"]] if field.metadata.get("short") else []
    return [*own, *field.metadata.get("names", ()), *(flag for flag, name in SHORT.items() if name == field.name)]


def _add_switch(section: Any, names: list[str], default: bool, common: dict[str, Any]) -> None:
    if default:
        section.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        return
    action = section.add_argument(*names, action="store_true", **common)
    hidden = {**common, "help": argparse.SUPPRESS}
    section.add_argument("--no-" + names[0][2:], dest=action.dest, action="store_false", **hidden)


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def reader(kind: type, name: str) -> Callable[[str], Any]:
    """The function that turns a word of the command line into a field's value."""
    read: Callable[[str], Any] = kind
    if kind is dict:
        read = json_object
    elif kind is int:
        read = size if name.endswith("_bytes") else whole

    def value(text: str) -> Any:
        own = own_value(name, text)
        return own if own != text else read(text)

    return value


def whole(text: str) -> int:
    """A whole number: 8192, 8k (8,000), 8K (8,192), 1.5m."""
    match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kmgtKMGT])", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number: write 8192, 8k or 8K")
    if match[1]:
        return int(match[1])
    power = "kmgt".index(match[3].lower()) + 1
    return int(float(match[2]) * (1000 if match[3].islower() else 1024) ** power)


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
