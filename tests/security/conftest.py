"""Servers for the security tests. Nothing here or there is an `assert`: the tests mean the same under `python -O`."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ServerProcess

LEAKS = re.compile(r"0x[0-9a-f]{4,}|Traceback|object at|\.py\b|/(usr|home|tmp|var|opt|root)/|line \d+", re.IGNORECASE)


def check(holds: Any, message: Any = "") -> None:
    if not holds:
        raise AssertionError(message)


def refused(response: httpx.Response, *statuses: int, says: str = "") -> dict[str, Any]:
    """The error of a request that was turned down: in OpenAI's shape, one sentence, nothing about our insides."""
    check(response.status_code in statuses, f"{response.status_code}, not {statuses}: {response.text[:300]}")
    check(response.headers["x-request-id"], "no request id")
    error = response.json()["error"]
    check(error.keys() == {"message", "type", "param", "code"}, error)
    check(error["message"] and len(error["message"]) < 500, error)
    check(not LEAKS.search(response.text), f"tells too much: {response.text}")
    check(says in error["message"], f"does not say {says!r}: {error['message']}")
    return error


def sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    return found


def unix_sockets(pid: int) -> set[Path]:
    """Where a process's named sockets lie."""
    own = sockets_of(pid)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = [row[7] for row in rows if len(row) > 7 and row[6] in own]
    return {Path(path) for path in paths if not path.startswith("@")}


@pytest.fixture(scope="session")
def server(smollm2) -> Iterator[ServerProcess]:
    """The real model, with default options except for sizes."""
    sizes = "--max-model-len 256 --max-num-seqs 4 --num-threads 1 --kv-cache-memory-bytes 64M --max-body-bytes 1M"
    with ServerProcess("smollm2", "--dtype", "float32", *sizes.split()) as process:
        yield process


@pytest.fixture(scope="session")
def locked(smollm2) -> Iterator[ServerProcess]:
    """With keys; repeats its prompts, 20 tokens a second, one request after the other, and only one may wait."""
    flags = ["--executor", "echo:20", "--max-num-seqs", "1", "--max-queued-requests", "2"]
    with ServerProcess(*flags, "--api-key", "k1", "--api-key", "k2", "--admin-api-key", "root") as process:
        process.client.headers["authorization"] = "Bearer k2"
        yield process


@pytest.fixture(scope="session")
def fragile(smollm2) -> Iterator[ServerProcess]:
    """Repeats its prompts at once, and crashes when it meets a marked one."""
    with ServerProcess("--executor", "tests.poison", "--watchdog-s", "2", "--max-model-len", "4096") as process:
        yield process
