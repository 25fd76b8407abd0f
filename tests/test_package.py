"""What `pip install .` gives: a wheel with everything the engine needs, and the command."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tracked_files() -> list[Path]:
    """As git knows them, relative to the root; those that were deleted are left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [Path(name) for name in listed.decode().split("\0") if (ROOT / name).is_file()]


def test_a_wheel_holds_the_kernels_the_licence_and_the_command(tmp_path):
    source = tmp_path / "source"
    for path in tracked_files():  # a copy, so that no build files appear in the tree
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    wheel = next(tmp_path.glob("quire-*.whl"))
    held = set(zipfile.ZipFile(wheel).namelist())
    package = (ROOT / "src" / "quire").rglob("*")
    kinds = {".py", ".cpp", ".h", ".html", ".js", ".css"}
    sources = {str(path.relative_to(ROOT / "src")) for path in package if path.suffix in kinds}
    assert sources <= held
    assert any(name.endswith("LICENSE") for name in held)
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    command = [tmp_path / "site" / "bin" / "quire", "--version"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True)
    assert done.stdout.startswith("quire "), done.stderr


def test_nothing_names_a_machine():
    """No paths of a build machine or references to files outside the project."""
    places = ("../" + "shared", "/" + "root/", "/" + "work/")
    for path in tracked_files():
        text = (ROOT / path).read_bytes().decode("utf-8", "ignore")
        assert not any(place in text for place in places), path
