"""Opens files that a stranger may have put there: only regular files, and nothing is read whole without a limit.

Used for every file of a model folder, a tokenizer, a chat template, a key file and a config file. A FIFO would wait
for a writer for ever, a device may never end, a sparse file may claim a terabyte. Links are followed: hub caches are
made of them.

Every refusal is an OSError whose `strerror` is for the user: callers say which file it was.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: str | Path) -> BinaryIO:
    """The file, open for reading."""
    try:
        _check_regular(os.stat(path))  # before it is opened: opening a device can have effects by itself
    except FileNotFoundError:
        if is_there(path):
            raise OSError(errno.EINVAL, "it is a link to a file that is not there") from None
        raise
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor))  # the path may name another file by now
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """The whole file."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise _too_large(max_bytes)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # files under /proc have no size
        raise _too_large(max_bytes)
    return content


def is_there(path: str | Path) -> bool:
    """Whether anything has this name, a link to nowhere too: that is a broken file, not a missing one."""
    return os.path.lexists(path)


def _check_regular(info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def _too_large(max_bytes: int) -> OSError:
    limit = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
    return OSError(errno.EFBIG, f"it is larger than {limit}")
