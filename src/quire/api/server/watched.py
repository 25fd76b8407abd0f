"""Files that are read again when they change: keys and certificates.

Their owners ask every second, in a thread: a file may lie on a slow disk. Knows no format.
"""

import errno
import hashlib
import os
import time
from pathlib import Path

from quire.utils.files import read_file

# A file written so recently may be written again without any other size or time of change.
SETTLED_S = 2.0

_NO_PATH = OSError(errno.EINVAL, "it holds a null character, which no path can")


class WatchedFiles:
    def __init__(self, paths: list[Path], max_bytes: int) -> None:
        self.paths = paths
        self.max_bytes = max_bytes
        self.seen: list[tuple[int, ...]] | None = None  # size, time of change and number of each
        self.is_settled = False
        self.digest = b""

    def changed(self) -> list[bytes | OSError] | None:
        """What is in each file, or why it cannot be read; None where nothing has changed since the last call."""
        stats = [_stat(path) for path in self.paths]
        seen = [stat[:3] for stat in stats]
        if seen == self.seen and self.is_settled:
            return None
        self.seen = seen
        newest_s = max((stat[1] for stat in stats if stat), default=0) / 1e9
        self.is_settled = time.time() - newest_s > SETTLED_S
        contents = [self._read(path) for path in self.paths]
        digest = hashlib.sha256(repr(contents).encode()).digest()
        if digest == self.digest:
            return None
        self.digest = digest
        return contents

    def _read(self, path: Path) -> bytes | OSError:
        try:
            return read_file(path, self.max_bytes)
        except OSError as error:
            return error
        except ValueError:
            return _NO_PATH


def _stat(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino
