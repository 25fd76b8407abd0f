"""Models of a hub: chooses the files of a repository that a model needs, and fetches them into the hub's cache.

Called by `find` for names such as org/name and org/name:Q4_K_M. `huggingface_hub` does the transfer: a file gets its
name only when it is complete, and what was fetched here is compared with the size and the SHA-256 that the hub lists.
Files come one after another, in the main thread, so that Ctrl-C ends a fetch at once. Knows nothing of what files mean.
"""

import fnmatch
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quire.checkpoint import gguf_names
from quire.errors import BadModelFileError, ModelNotFoundError, QuireError, UnsupportedModelError
from quire.utils.files import open_file

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})(?::([\w.-]{1,128}))?", re.ASCII)
# What a text model needs. Weights as safetensors only: other formats would be downloaded just to be refused.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_DEFAULT_QUANTIZATION = "Q4_K_M"  # where a repository has several GGUF files, as in llama.cpp and Ollama
_MAX_LISTED = 12  # names in one message
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubName:
    """org/name, or org/name:QUANTIZATION."""

    repo: str
    quantization: str | None

    @classmethod
    def of(cls, typed: str) -> "HubName | None":
        found = _NAME.fullmatch(typed)
        return cls(found[1], found[2]) if found and ".." not in typed else None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quantization}" if self.quantization else self.repo


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files of one model in a repository; the last one makes it complete: config.json, or the last part."""

    kind: str  # "gguf" or "hf"
    names: list[str]


@dataclass(frozen=True, slots=True)
class _Listed:
    """What the hub says of a file."""

    size_bytes: int | None
    sha256: str | None  # of large files


def fetch_from_hub(name: HubName, revision: str | None, download_dir: str | Path | None) -> Path:
    """A GGUF file (the first part of a split one) or a folder with config.json; fetched if it is not in the cache."""
    hub = _library(name)
    try:
        info = hub.HfApi().model_info(name.repo, revision=revision, files_metadata=True)
        listed = {sibling.rfilename: _listed(sibling) for sibling in info.siblings or []}
    except Exception as error:  # HTTP, name resolution, TLS, proxies, the hub's own
        return _from_cache(hub, name, revision, download_dir, error)
    chosen = choose(name, listed)
    try:
        return _fetch(hub, name, chosen, listed, info.sha, revision, download_dir)
    except QuireError:
        raise
    except Exception as error:
        raise ModelNotFoundError(_why_no_download(name, revision, error)) from error


def choose(name: HubName, listed: Mapping[str, Any]) -> Chosen:
    """Which of a repository's files to have; the names come from a hub, so they are checked like any input."""
    for file_name in listed:
        if not _is_plain(file_name):
            raise BadModelFileError(f"{name.repo} lists a file {file_name!r:.80}, which is no name of a file.")
    ggufs = gguf_names.models(listed)
    in_top_folder = [file_name for file_name in listed if "/" not in file_name]
    plain = [each for each in in_top_folder if any(fnmatch.fnmatchcase(each, pattern) for pattern in _FILES)]
    plain = [each for each in plain if not each.startswith("consolidated")]  # the same weights a second time
    has_weights = any(each.endswith(".safetensors") for each in plain)
    if name.quantization is None and "config.json" in plain and (has_weights or not ggufs):
        return Chosen("hf", sorted(plain, key=lambda each: (each == "config.json", each)))
    if not ggufs:
        what = "no GGUF file" if name.quantization else "neither config.json nor a GGUF file"
        raise ModelNotFoundError(f"{name.repo} has {what}: name another repository.")
    return Chosen("gguf", _choose_gguf(name, ggufs))


def _choose_gguf(name: HubName, ggufs: dict[str, list[str]]) -> list[str]:
    wanted = name.quantization or (next(iter(ggufs)) if len(ggufs) == 1 else _DEFAULT_QUANTIZATION)
    readable = sorted(label for label in ggufs if gguf_names.is_readable(label))
    others = f" and {len(readable) - _MAX_LISTED} more" if len(readable) > _MAX_LISTED else ""
    there = ", ".join(readable[:_MAX_LISTED]) + others or "none that Quire reads"
    files = gguf_names.choose(ggufs, wanted)
    if files is None and name.quantization is None:
        raise ModelNotFoundError(f"{name.repo} has several GGUF files: name one, as in {name.repo}:{there}.")
    if files is None:
        raise ModelNotFoundError(f"{name.repo} has no GGUF file {wanted!r:.80}: there is {there}.")
    if not gguf_names.is_readable(wanted):
        raise UnsupportedModelError(f"{name.repo}:{wanted} is of a kind Quire does not read: there is {there}.")
    if missing := gguf_names.missing_parts(files):
        raise BadModelFileError(f"{name.repo} lacks {PurePosixPath(missing[0]).name}: name another repository.")
    return files


def _fetch(
    hub: Any,
    name: HubName,
    chosen: Chosen,
    listed: Mapping[str, _Listed],
    commit: str,
    revision: str | None,
    download_dir: str | Path | None,
) -> Path:
    def is_cached(file_name: str) -> bool:
        return isinstance(hub.try_to_load_from_cache(name.repo, file_name, download_dir, commit), str)

    missing = [file_name for file_name in chosen.names if not is_cached(file_name)]
    if missing:
        size_bytes = sum(listed[file_name].size_bytes or 0 for file_name in missing)
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        _tell(f"Fetching {name}: {count}, {shown_size(size_bytes)}")
    folder: Path | None = None
    for file_name in chosen.names:
        # One commit for all of them; the last is asked for by its branch, by which the model is found without a hub.
        asked = revision if file_name == chosen.names[-1] else commit
        path = Path(hub.hf_hub_download(name.repo, file_name, revision=asked, cache_dir=download_dir))
        own_folder = path.parents[file_name.count("/")]
        if folder is not None and own_folder != folder:
            raise ModelNotFoundError(f"{name} changed on the hub while it was fetched: run again.")
        folder = own_folder
        if file_name in missing:
            _check(path, file_name, listed[file_name])
    if folder is None:
        raise ModelNotFoundError(f"{name.repo} has no files: name another repository.")
    return folder if chosen.kind == "hf" else folder / chosen.names[0]


def _check(path: Path, file_name: str, listed: _Listed) -> None:
    """Removes a file that is not the one the hub lists."""
    is_other = listed.sha256 is not None and _sha256(path) != listed.sha256
    if is_other or listed.size_bytes not in (None, path.stat().st_size):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        what = "SHA-256" if is_other else "size"
        raise BadModelFileError(
            f"what the hub gave as {file_name} is not the file it lists (its {what} differs): run again."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _from_cache(
    hub: Any, name: HubName, revision: str | None, download_dir: str | Path | None, error: Exception
) -> Path:
    """The model as it was fetched before; `error` is why the hub did not say what there is now."""
    try:
        folder = Path(hub.snapshot_download(name.repo, revision=revision, cache_dir=download_dir, **_CACHE_ONLY))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        chosen = choose(name, dict.fromkeys(names))
    except QuireError as why:
        raise ModelNotFoundError(f"{_why_no_download(name, revision, error)[:-1]}; of what is here: {why}") from error
    except Exception:
        raise ModelNotFoundError(_why_no_download(name, revision, error)) from error
    return folder if chosen.kind == "hf" else folder / chosen.names[0]


# A listing of nothing: whether files are missing is for us to say.
_CACHE_ONLY: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}


def _library(name: HubName) -> Any:
    try:
        import huggingface_hub  # here: it takes a while to import and most runs need no hub
    except ImportError:
        raise ModelNotFoundError(
            f"there is no {name} here, and fetching it from a hub needs huggingface_hub: pip install huggingface_hub."
        ) from None
    return huggingface_hub


def _listed(sibling: Any) -> _Listed:
    lfs = sibling.lfs
    return _Listed(sibling.size, getattr(lfs, "sha256", None) if lfs is not None else None)


def _is_plain(file_name: str) -> bool:
    """Whether a name stays inside the folder it is joined to."""
    parts = file_name.split("/")
    return "\\" not in file_name and "\0" not in file_name and not {"", ".", ".."} & set(parts)


def _why_no_download(name: HubName, revision: str | None, error: Exception) -> str:
    """One sentence; told apart by class name, since the hub's classes have moved between its versions."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"the hub lets only approved users have {name}: accept its terms there and log in with `hf auth login`."
    if "RevisionNotFoundError" in kinds:
        return f"{name} has no revision {revision!r:.80} on the hub: name a branch, tag or commit it has."
    if "RepositoryNotFoundError" in kinds:
        return f"there is no {name} here or on the hub: check its spelling, or log in if it is private."
    system_error = error.strerror if isinstance(error, OSError) else None
    if system_error and "EntryNotFoundError" not in kinds:
        return f"{name} could not be fetched ({system_error}): make room or name another place with --download-dir."
    return f"there is no {name} here and no hub could be reached ({type(error).__name__}): give files instead."


def shown_size(num_bytes: int) -> str:
    """As downloads are counted: 4.1 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
