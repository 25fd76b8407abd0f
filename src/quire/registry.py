"""A folder is a registry: the name of an extension is the name of its file.

Used wherever a name chosen by a user or a checkpoint becomes code (executors, attention backends, models). Files are
listed without importing them; literals such as a model's ARCHITECTURES are read from the source, so looking one up
imports one file.
"""

import ast
import functools
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from quire.errors import ConfigError


def names(package: str) -> list[str]:
    """The extensions in a package, by file name; `base`, private files and folders are not extensions."""
    path = importlib.import_module(package).__path__
    files = [module.name for module in pkgutil.iter_modules(path) if not module.ispkg]
    return sorted(name for name in files if name != "base" and not name.startswith("_"))


def load(package: str, name: str) -> ModuleType:
    """The module of one extension; ConfigError lists what there is. A dotted path names a module from elsewhere."""
    kind = package.rsplit(".", 1)[1]
    if "." in name:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"the {kind} {name!r} cannot be imported: {error}") from None
    if name not in names(package):
        raise ConfigError(f"there is no {kind} {name!r}: choose from {', '.join(names(package))}")
    return importlib.import_module(f"{package}.{name}")


def find_literal(package: str, variable: str, wanted: Iterable[str]) -> str | None:
    """The extension whose `variable` lists one of these: the first of them that any lists."""
    by_value = {value: name for name, listed in literals(package, variable).items() for value in listed}
    return next((by_value[value] for value in wanted if value in by_value), None)


@functools.cache
def literals(package: str, variable: str) -> dict[str, Any]:
    """`variable = <literal>` of each extension's file that has it: file name -> value, nothing imported."""
    path = list(importlib.import_module(package).__path__)[0]
    found = {}
    for name in names(package):
        with open(f"{path}/{name}.py", encoding="utf-8") as file:
            statements = ast.parse(file.read()).body
        for statement in statements:
            if isinstance(statement, ast.Assign):
                assigned = [getattr(target, "id", None) for target in statement.targets]
                if variable in assigned:
                    found[name] = ast.literal_eval(statement.value)
    return found
