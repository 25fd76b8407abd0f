"""The flags that `pull`, `list` and `rm` share."""

from dataclasses import dataclass

from quire.config import knob


@dataclass(frozen=True)
class CacheOptions:
    """Where models are kept"""

    download_dir: str | None = knob(None, "where models of a hub are (default: the hub's own cache)", metavar="FOLDER")
