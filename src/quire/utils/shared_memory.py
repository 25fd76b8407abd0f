"""Memory that processes share: anonymous, passed on as a file descriptor, of a size that cannot change.

The core makes it (`group_memory`, `link_memory`) and passes the descriptor to the workers it starts; these map it
(`map_shared`) and exchange tensors through it (`distributed/shared_memory.py`). Knows sizes, not what is exchanged.

The layout: a line with the header, a line per flag, and from the next page on the slots. `ops/cpu/src/ranks.cpp` knows
what flags and slots mean.
"""

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from quire.errors import ConfigError

LINE_BYTES = 128  # two cache lines, as CPUs fetch them: what one process writes is alone there
_HEADER = struct.Struct("<8sQQQ")  # kind, flags, slots, bytes of a slot
GROUP, LINK = b"qu.group", b"qu.link\0"
LINK_SLOTS = 4  # a power of two: counts of messages wrap around
GROUP_SLOT_BYTES = LINK_SLOT_BYTES = 1 << 17  # fits the second-level cache several times
_MOST_BYTES = 1 << 40


@dataclass(frozen=True)
class Layout:
    kind: bytes
    num_flags: int
    num_slots: int
    slot_bytes: int

    @property
    def slots_start(self) -> int:
        return -(-(1 + self.num_flags) * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.slots_start + self.num_slots * self.slot_bytes


def group_memory(size: int, slot_bytes: int = GROUP_SLOT_BYTES) -> int:
    """The descriptor of memory through which `size` ranks exchange: a flag and two slots for each."""
    return _laid_out(Layout(GROUP, size, 2 * size, slot_bytes))


def link_memory(slot_bytes: int = LINK_SLOT_BYTES) -> int:
    """The descriptor of a ring from one process to another: a flag for each end."""
    return _laid_out(Layout(LINK, 2, LINK_SLOTS, slot_bytes))


def store_file() -> int:
    """The descriptor of an empty file without a name, in which ranks leave each other what they need to connect."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("several workers need Linux: use a tensor and pipeline parallel size of 1")
    return os.memfd_create("qu.store", os.MFD_CLOEXEC)


def sealed_memory(name: str, num_bytes: int) -> int:
    """The descriptor of so many zero bytes; whoever holds it can neither grow nor shrink them. `name` is for /proc."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("several workers on CPUs need Linux: use a tensor and pipeline parallel size of 1")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _laid_out(layout: Layout) -> int:
    if layout.num_flags < 1 or layout.slot_bytes < 64 or layout.slot_bytes % 64:
        raise ValueError(f"shared memory for {layout.num_flags} ranks with slots of {layout.slot_bytes} bytes")
    fd = sealed_memory(layout.kind.decode().rstrip("\0"), layout.num_bytes)
    os.pwrite(fd, _HEADER.pack(layout.kind, layout.num_flags, layout.num_slots, layout.slot_bytes), 0)
    return fd


def map_shared(fd: int, kind: bytes) -> tuple[mmap.mmap, Layout]:
    """The mapping, and the layout its header tells, which is checked. The descriptor may be closed then."""
    try:
        seals, num_bytes = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        found, *sizes = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    except (OSError, struct.error) as error:
        raise ValueError(f"file descriptor {fd} is no shared memory of ours: {error}") from None
    layout = Layout(found, *sizes)
    if not seals & fcntl.F_SEAL_SHRINK or found != kind or max(sizes) > _MOST_BYTES or layout.num_bytes != num_bytes:
        raise ValueError(f"file descriptor {fd} is no shared memory of ours for {kind.decode().rstrip(chr(0))}")
    # Populated: a page that is missing would cost time in the first steps.
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)), layout
