"""Makes Triton's interpreter, in which kernels run where there is no card, about twice as fast.

Imported by conftest.py. Kernels compute what they did: only work is left out of which nobody sees a result.
"""

import inspect
from functools import cache
from types import ModuleType

import triton.language as tl
from triton.runtime import interpreter

# Sums and products of whole numbers are computed once more, in 64 bits, to be checked; nothing is checked without
# `debug`, which the interpreter does not have.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@cache
def _builtins(package: ModuleType | type) -> list[tuple[str, object]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(
    package: ModuleType | type,
    builder: interpreter.InterpreterBuilder,
    scope: interpreter._LangPatchScope,
) -> None:
    """As Triton's own, which looks at all names of the language whenever a kernel calls a function."""
    for name, member in _builtins(package):
        if getattr(package, name) is member:  # else the kernel that calls the function has replaced it already
            interpreter._patch_attr(package, name, member, builder, scope)


interpreter._patch_builtin = _patch_builtin
