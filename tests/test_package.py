"""What `pip install .` gives: a wheel with everything the engine needs, and the command."""

import subprocess
import zipfile

from tests.wheel import ROOT, build, install, tracked_files


def test_a_wheel_holds_the_kernels_the_licence_and_the_command(tmp_path):
    wheel = build(tmp_path)
    held = set(zipfile.ZipFile(wheel).namelist())
    package = (ROOT / "src" / "quire").rglob("*")
    kinds = {".py", ".cpp", ".h", ".html", ".js", ".css"}
    sources = {str(path.relative_to(ROOT / "src")) for path in package if path.suffix in kinds}
    assert sources <= held
    assert any(name.endswith("LICENSE") for name in held)
    install(wheel, tmp_path / "site")
    command = [tmp_path / "site" / "bin" / "quire", "--version"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True)
    assert done.stdout.startswith("quire "), done.stderr


def test_nothing_names_a_machine():
    """No paths of a build machine or references to files outside the project."""
    places = ("../" + "shared", "/" + "root/", "/" + "work/")
    for path in tracked_files():
        text = (ROOT / path).read_bytes().decode("utf-8", "ignore")
        assert not any(place in text for place in places), path
