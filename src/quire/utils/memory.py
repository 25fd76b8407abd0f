"""How much memory this process may still take, container limits included."""

from pathlib import Path


def available_bytes() -> int:
    """MemAvailable, or less where a control group allows less."""
    return min([_meminfo("MemAvailable"), *_cgroup_room()])


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
