"""Tries hostile files and templates in a process of their own: one that hangs is a failed test, not a hung one."""

import json
import resource
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.security.conftest import check

CHILD = Path(__file__).with_name("trial_child.py")
LIMIT_BYTES = 6 << 30  # far more than anything here may take; files that are mapped do not count


class Trial:
    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, timeout_s: float = 120.0, **job: Any) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES)),
            )
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise AssertionError(f"{'died' if ready else 'hung'}: {str(job)[:200]}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def refused(answer: dict[str, Any], *kinds: str, seconds: float = 10.0, grown_mb: float = 256.0) -> str:
    """The one sentence of an error raised on purpose, within bounds."""
    check(answer["kind"] and "QuireError" in answer["kind"], f"not refused: {str(answer)[:300]}")
    check(not kinds or set(kinds) & set(answer["kind"]), f"not {kinds}: {answer}")
    check("\n" not in answer["error"] and len(answer["error"]) < 700, f"not one sentence: {answer['error'][:900]}")
    check(answer["seconds"] < seconds, f"took {answer['seconds']:.1f} s: {answer['error']}")
    check(answer["grown_mb"] < grown_mb, f"took {answer['grown_mb']:.0f} MB: {answer['error']}")
    return answer["error"]
