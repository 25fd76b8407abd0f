"""What `pip install .` gives: a wheel with everything the engine needs, and the command."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_wheel_holds_the_kernels_the_licence_and_the_command(tmp_path):
    source = tmp_path / "source"
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    )
    for name in filter(None, listed):  # a copy, so that no build files appear in the tree
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    wheel = next(tmp_path.glob("quire-*.whl"))
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        f"quire/{p.relative_to(ROOT / 'src' / 'quire')}"
        for p in (ROOT / "src" / "quire").rglob("*")
        if p.suffix in {".py", ".cpp", ".h"}
    }
    assert sources <= held
    assert any(name.endswith("LICENSE") for name in held)
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    done = subprocess.run(
        [tmp_path / "site" / "bin" / "quire", "--version"],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("quire "), done.stderr


def test_nothing_names_a_machine():
    """No paths of a build machine or references to files outside the project."""
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    )
    for name in filter(None, listed):
        text = (ROOT / name).read_bytes().decode("utf-8", "ignore") if (ROOT / name).is_file() else ""
        assert "../" + "shared" not in text and "/" + "root/" not in text and "/" + "work/" not in text, name
