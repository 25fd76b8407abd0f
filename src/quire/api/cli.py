"""The `quire` command: finds the subcommand's file, builds its flags, turns errors into one line and an exit code.

A file in `commands/` is a command: it has `HELP`, `OPTIONS` (classes whose fields become flags; `options_of(argv)`
where they depend on what was typed) and `run(args)`; other names for it are its `ALIASES`.
"""

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

from quire import __version__, env
from quire.config.flags import Parser, add_flags
from quire.errors import ConfigError, QuireError
from quire.registry import literals

COMMANDS = "quire.api.commands"

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(argv: list[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Runs one command; the exit code. Errors meant for people are one line on stderr, others a traceback."""
    try:
        line = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
        logging.basicConfig(level=env.log_level(), format=line, datefmt="%H:%M:%S")
        args = parser(argv).parse_args(argv)
        if not hasattr(args, "run"):
            parser(argv).print_help()
            return 0
        return args.run(args) or 0
    except QuireError as error:
        print(f"quire: {error}" + (f" (see {error.hint})" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `quire … | head`
        sys.stderr.close()
        return 0


def parser(argv: list[str]) -> Parser:
    """The parser; only the command that was typed is imported."""
    top = Parser(prog="quire", description="Serve and run large language models.")
    top.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    help_texts: Mapping[str, Any] = literals(COMMANDS, "HELP")
    aliases: Mapping[str, Any] = literals(COMMANDS, "ALIASES")
    typed = next((word for word in argv if not word.startswith("-")), None)
    typed = next((name for name, others in aliases.items() if typed in others), typed)
    for name, text in help_texts.items():
        sub = commands.add_parser(name, aliases=aliases.get(name, ()), help=text, description=text, add_help=True)
        if name == typed:
            module = importlib.import_module(f"{COMMANDS}.{name}")
            if hasattr(module, "USAGE"):
                sub.usage = module.USAGE
            for options in module.options_of(argv) if hasattr(module, "options_of") else module.OPTIONS:
                add_flags(sub, options)
            sub.set_defaults(run=module.run)
    if typed is not None and typed not in help_texts:
        raise ConfigError(f"there is no command {typed!r}: choose from {', '.join(help_texts)}")
    return top
