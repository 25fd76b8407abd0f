"""The few environment variables Quire reads, each a function; the only module that touches `os.environ`.

Called by whoever needs the value, at the moment it is needed, so that tests can set them.
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    """QUIRE_CACHE: where fetched models and compiled kernels are kept."""
    return Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire").expanduser()


def log_level() -> str:
    """QUIRE_LOG_LEVEL: debug, info, warning or error."""
    return os.environ.get("QUIRE_LOG_LEVEL", "warning").upper()


def native_kernels_allowed() -> bool:
    """QUIRE_NATIVE=0 turns the compiled CPU kernels off; their torch twins run instead."""
    return os.environ.get("QUIRE_NATIVE", "1") != "0"


def compiler() -> str | None:
    """CXX: the C++ compiler for the CPU kernels, else the first one found on PATH."""
    return os.environ.get("CXX")
