"""What has been fetched and lies on this disk: lists models and removes them.

Called by the commands `list` and `rm`. Two places are known: our own cache, with the models that have a name of their
own, and the hub's, which other programs share. A name never becomes a path: it is compared with what is there. Links
are not followed out of these places, and nothing outside of them is removed.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire import env
from quire.checkpoint import gguf_names
from quire.checkpoint.find import KNOWN_MODELS
from quire.checkpoint.hub import HubName
from quire.errors import ConfigError, ModelError, ModelNotFoundError

_PREFIX = "models--"  # of a repository's folder in the hub's cache; the name follows, with -- for the slash


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model that can be run without fetching anything."""

    name: str  # as other commands take it
    size_bytes: int
    modified_s: float  # since 1970
    path: Path  # of its folder, or of the first of its files
    files: list[Path] = field(repr=False)  # with their names, not what these link to


def kept_models(download_dir: str | Path | None = None) -> list[KeptModel]:
    """In the order of their names."""
    try:
        found = [*_known(), *(model for folder in _repositories(download_dir) for model in _of_repository(folder))]
    except OSError as error:
        raise ModelError(f"the models here cannot be read ({error.strerror or error}): check who owns it.") from None
    return sorted(found, key=lambda model: model.name.lower())


def remove(typed: str, download_dir: str | Path | None = None) -> list[KeptModel]:
    """Removes a model by the name that `kept_models` gives it; org/name stands for all that came from there."""
    name = HubName.of(typed)
    if typed not in KNOWN_MODELS and name is None:
        raise ConfigError(f"{typed!r:.200} is no name that `quire list` shows: files elsewhere are yours to remove.")
    try:
        removed = _remove_known(typed) if name is None else _remove_from_hub(name, download_dir)
    except OSError as error:
        raise ModelError(f"{typed} cannot be removed ({error.strerror or error}): check who owns it.") from None
    if not removed:
        raise ModelNotFoundError(f"there is no {typed:.200} here to remove: `quire list` shows what there is.")
    return removed


def _remove_known(name: str) -> list[KeptModel]:
    removed = [model for model in _known() if model.name == name]
    for model in removed:
        model.path.unlink()
    return removed


def _known() -> Iterator[KeptModel]:
    for name, model in KNOWN_MODELS.items():
        path = env.cache_dir() / model.file_name
        if _is_file(path):
            info = path.lstat()
            yield KeptModel(name, info.st_size, info.st_mtime, path, [path])


def hub_cache(download_dir: str | Path | None = None) -> Path | None:
    """Where the hub's client keeps what it fetches; None where it is not installed."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return Path(constants.HF_HUB_CACHE)


def _repositories(download_dir: str | Path | None) -> list[Path]:
    cache = hub_cache(download_dir)
    if cache is None or not cache.is_dir():
        return []
    return sorted(path for path in cache.iterdir() if _is_folder(path) and _name_of(path) is not None)


def _name_of(folder: Path) -> str | None:
    """org/name of a repository's folder; None for anything else."""
    parts = folder.name.split("--")
    name = HubName.of("/".join(parts[1:])) if folder.name.startswith(_PREFIX) and len(parts) == 3 else None
    return name.repo if name is not None else None


def _of_repository(folder: Path) -> list[KeptModel]:
    """Its models; of one that was fetched at several commits, the newest."""
    newest: dict[str, KeptModel] = {}
    for snapshot in _snapshots(folder):
        for model in _of_snapshot(folder, snapshot):
            if model.name not in newest or newest[model.name].modified_s < model.modified_s:
                newest[model.name] = model
    return list(newest.values())


def _snapshots(folder: Path) -> list[Path]:
    parent = folder / "snapshots"
    return sorted(path for path in parent.iterdir() if _is_folder(path)) if _is_folder(parent) else []


def _of_snapshot(folder: Path, snapshot: Path) -> Iterator[KeptModel]:
    repo = _name_of(folder)
    files = {path.relative_to(snapshot).as_posix(): path for path in _files_below(snapshot) if path.is_file()}
    if "config.json" in files and any(name.endswith(".safetensors") for name in files):
        own = [path for name, path in files.items() if not name.endswith(".gguf")]
        yield _model(str(repo), snapshot, own)
    for label, names in gguf_names.models(files).items():
        if not gguf_names.missing_parts(names):
            own = [files[name] for name in names]
            yield _model(f"{repo}:{label}", own[0], own)


def _model(name: str, path: Path, files: list[Path]) -> KeptModel:
    infos = [file.stat() for file in files]
    return KeptModel(name, sum(i.st_size for i in infos), max(i.st_mtime for i in infos), path, files)


def _remove_from_hub(name: HubName, download_dir: str | Path | None) -> list[KeptModel]:
    """A whole repository, or the files of one quantization with what they link to."""
    folder = next((each for each in _repositories(download_dir) if _name_of(each) == name.repo), None)
    if folder is None:
        return []
    models = _of_repository(folder)
    if name.quantization is not None:
        wanted = {model.name.partition(":")[2]: [model.name] for model in models if ":" in model.name}
        found = gguf_names.choose(wanted, name.quantization)
        if found is None:
            return []
        removed = [model for model in models if model.name in found]
        if len(removed) < len(models):
            _remove_files(folder, removed[0].name)
            return removed
        models = removed
    shutil.rmtree(folder / "snapshots", ignore_errors=True)  # first: what is half removed must not be found
    shutil.rmtree(folder)
    # A fetch that was interrupted leaves a repository without a model in it.
    return models or [KeptModel(name.repo, 0, 0.0, folder, [])]


def _remove_files(folder: Path, name: str) -> None:
    """The files of one model at all commits, and their contents where no other file of the repository has the same."""
    doomed = [
        file
        for snapshot in _snapshots(folder)
        for model in _of_snapshot(folder, snapshot)
        if model.name == name
        for file in model.files
    ]
    contents = {file.resolve() for file in doomed}
    for file in doomed:
        file.unlink()
    still_used = {file.resolve() for snapshot in _snapshots(folder) for file in _files_below(snapshot)}
    blobs = (folder / "blobs").resolve()
    for content in contents - still_used:
        if content.parent == blobs and _is_file(content):
            content.unlink()


def _files_below(folder: Path) -> Iterator[Path]:
    """Files and links; folders that are links are not entered."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    """Of what has this name, not of what it links to."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0
