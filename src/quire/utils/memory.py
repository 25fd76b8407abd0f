"""How much memory this process may still take, container limits included, and giving back what it no longer needs."""

import ctypes
from pathlib import Path


def available_bytes() -> int:
    """MemAvailable, or less where a control group allows less."""
    return min([_meminfo("MemAvailable"), *_cgroup_room()])


def give_back_freed() -> None:
    """Returns freed memory to the system, also what glibc keeps because it lies between what is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return 4 << 30  # not Linux: a modest guess; --kv-cache-memory-bytes says otherwise


def _cgroup_room() -> list[int]:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return [] if limit == "max" else [max(0, int(limit) - int(used))]
    except (OSError, ValueError):
        return []
