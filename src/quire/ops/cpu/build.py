"""Compiles the C++ kernels of `src/` once with the system compiler and loads them with ctypes.

Called by the modules `ops/*/cpu.py`, by most through `tape.compiled`. Knows nothing about what a kernel computes: a
source has a plain C ABI, needs no torch headers (so it builds in seconds), and has a twin to fall back on. `load` never
raises.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from quire import env

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
COMPILE_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")
COMPILE_TIMEOUT_S = 300


@functools.cache
def load(name: str, *defines: str) -> ctypes.CDLL | None:
    """The compiled `src/<name>.cpp`; None where the twin must run instead, with a line in the log that says why.

    `defines`: macros, such as KIND=4, for a source that is compiled in several ways.
    """
    try:
        return _load(name, [f"-D{define}" for define in defines])
    except _Unavailable as error:
        reason = str(error)
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} failed: {error.stderr.strip()[-2000:]}"
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    logger.info("compiled CPU kernels %r are off, using the torch ones: %s", name, reason)
    return None


class _Unavailable(Exception):
    pass


def _load(name: str, flags: list[str]) -> ctypes.CDLL:
    if not env.native_kernels_allowed():
        raise _Unavailable("QUIRE_NATIVE=0")
    compiler, runtime = _find_compiler(), _openmp_runtime()
    if compiler is None:
        raise _Unavailable("no C++ compiler found (install g++ or set CXX)")
    if runtime is None:
        raise _Unavailable("torch has no libgomp whose threads could be shared")
    library = _library_path(name, compiler, runtime, flags)
    if not library.exists():
        _compile(SOURCES / f"{name}.cpp", library, compiler, runtime, flags)
    return ctypes.CDLL(str(library))


def _find_compiler() -> str | None:
    named = env.compiler()
    candidates = (named,) if named else ("g++", "c++", "clang++")
    return next((path for path in map(shutil.which, candidates) if path), None)


@functools.cache
def _openmp_runtime() -> Path | None:
    """The libgomp that torch has loaded: with the same file, kernels use the threads of torch, as many as it is set to.

    A second copy would start as many threads again, and the two pools would compete for the cores.
    """
    try:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "libgomp" in line}
    except OSError:  # not Linux
        mapped = set()
    bundled = Path(torch.__file__).parent / "lib"
    candidates = sorted(Path(path) for path in mapped) + sorted(bundled.glob("libgomp*.so*"))
    return next(iter(candidates), None)


@functools.cache
def _machine(compiler: str) -> str:
    """What decides the code `-march=native` gives: the compiler's version and the CPU's model and features."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return f"{version}\n{platform.machine()}\n{_cpu()}"


@functools.cache
def _cpu() -> str:
    try:
        fields = ("model name", "flags", "Features", "CPU part")
        lines = [line for line in open("/proc/cpuinfo").read().splitlines() if line.startswith(fields)]
        return "\n".join(sorted(set(lines)))
    except OSError:
        return platform.processor()


def has_amx() -> bool:
    """Whether the CPU multiplies tiles of bfloat16."""
    return "amx_bf16" in _cpu().split()


def _library_path(name: str, compiler: str, runtime: Path, flags: list[str]) -> Path:
    key = hashlib.sha256("\n".join((_machine(compiler), runtime.name, *COMPILE_FLAGS, *flags)).encode())
    for source in (SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))):
        key.update(source.read_bytes())
    return env.cache_dir() / "native" / f"{name}-{key.hexdigest()[:24]}.so"


def _compile(source: Path, library: Path, compiler: str, runtime: Path, flags: list[str]) -> None:
    """Two processes may compile at once: each works in a folder of its own, and the last rename wins."""
    # A warning, so that people see what they are waiting for.
    logger.warning("compiling CPU kernels for this machine, once: %s …", " ".join((source.stem, *flags)))
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{source.stem}-") as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        # Linked without -fopenmp, which would add the compiler's own libgomp.
        for command in (
            [compiler, *COMPILE_FLAGS, *flags, "-c", str(source), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), str(runtime), "-o", str(linked)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        os.replace(linked, library)
