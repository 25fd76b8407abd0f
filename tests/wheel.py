"""The package as `pip install .` would install it, without what it needs: tests see what a user's machine has."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip"]


def tracked_files() -> list[Path]:
    """As git knows them, relative to the root; those that were deleted are left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [Path(name) for name in listed.decode().split("\0") if (ROOT / name).is_file()]


def build(folder: Path) -> Path:
    """The wheel, made in that folder."""
    source = folder / "source"
    for path in tracked_files():  # a copy, so that no build files appear in the tree
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    subprocess.run([*PIP, "wheel", "-q", "--no-deps", "-w", str(folder), str(source)], check=True)
    return next(folder.glob("quire-*.whl"))


def install(wheel: Path, site: Path) -> None:
    """Into a folder for PYTHONPATH."""
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True)
