"""Names of a hub, with the real client of the hub and a hub on loopback: what is chosen, fetched, checked, listed and
removed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from quire.api.cli import run
from quire.checkpoint.find import find
from quire.checkpoint.hub import HubName, choose
from quire.checkpoint.kept import kept_models, remove
from quire.errors import BadModelFileError, ConfigError, ModelNotFoundError, UnsupportedModelError
from tests.checkpoint.loopback_hub import LoopbackHub, running_hub

GGUFS = {
    "README.md": b"a model",
    "config.json": b"{}",
    "model-Q4_K_M.gguf": b"GGUF four" * 100,
    "model-Q8_0.gguf": b"GGUF eight" * 100,
    "model-IQ2_XXS.gguf": b"GGUF two",
    "mmproj-model-f16.gguf": b"GGUF eyes",
    "BF16/model-BF16-00001-of-00002.gguf": b"GGUF one",
    "BF16/model-BF16-00002-of-00002.gguf": b"GGUF two",
}
FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"weights" * 1000,
    "consolidated.safetensors": b"again",
    "pytorch_model.bin": b"pickled",
    "modeling_own.py": b"raise SystemExit",
    "onnx/model.json": b"{}",
}


@pytest.fixture(scope="module")
def running() -> Iterator[LoopbackHub]:
    with running_hub() as hub:
        yield hub


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if HF_ENDPOINT had been set before the client was imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hub(running: LoopbackHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A fresh one of two repositories, known to the client of this process."""
    running.repos = {"org/ggufs": dict(GGUFS), "org/folder": dict(FOLDER)}
    running.served, running.listed_names, running.refused, running.asked = {}, {}, {}, []
    running.cut_after, running.stalled = None, None
    running.begun.clear()
    use_hub(running.url, monkeypatch)
    return running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "quire"))
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ---- names ----


@pytest.mark.parametrize(
    ("typed", "repo", "quantization"),
    [
        ("org/name", "org/name", None),
        ("org/name:Q4_K_M", "org/name", "Q4_K_M"),
    ],
)
def test_a_hub_s_name_may_have_a_quantization(typed: str, repo: str, quantization: str | None) -> None:
    assert HubName.of(typed) == HubName(repo, quantization)


@pytest.mark.parametrize(
    "typed",
    ["../x", "a/..", "a/../b", "/etc/passwd", "org/name:", "org/name:../x", "a/b/c", "org/name:a/b", "org/.git"],
)
def test_what_could_be_a_path_is_no_hub_s_name(typed: str) -> None:
    assert HubName.of(typed) is None


@pytest.mark.parametrize("name", ["../../evil.gguf", "/etc/evil.gguf", "a//b.gguf", "a\\b.gguf", "./x.json", "a/../b"])
def test_a_repository_that_lists_paths_is_refused(name: str) -> None:
    with pytest.raises(BadModelFileError, match="which is no name of a file"):
        choose(HubName("org/name", None), {"config.json": None, name: None})


# ---- choosing ----


def test_a_quantization_is_chosen_and_nothing_else_is_fetched(hub: LoopbackHub, cache: Path) -> None:
    for typed in ("org/ggufs:Q8_0", "org/ggufs:q8_0"):
        files = find(typed)
        assert (files.name, files.kind, files.path.name) == (typed, "gguf", "model-Q8_0.gguf")
        assert files.path.read_bytes() == GGUFS["model-Q8_0.gguf"]
    assert hub.downloads() == ["model-Q8_0.gguf"]
    assert cache in files.path.parents


def test_without_one_it_is_q4_k_m_as_elsewhere_or_the_only_one(hub: LoopbackHub) -> None:
    assert find("org/ggufs").path.name == "model-Q4_K_M.gguf"
    hub.repos["org/one"] = {"only.gguf": b"GGUF"}
    assert find("org/one").path.name == "only.gguf"


def test_all_parts_of_a_split_file_are_fetched(hub: LoopbackHub) -> None:
    path = find("org/ggufs:BF16").path
    assert path.name == "model-BF16-00001-of-00002.gguf"
    assert files_in(path.parent) == ["model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("typed", "error", "says"),
    [
        ("org/ggufs:Q5_K_M", ModelNotFoundError, "no GGUF file 'Q5_K_M': there is BF16, Q4_K_M, Q8_0"),
        ("org/ggufs:IQ2_XXS", UnsupportedModelError, "does not read: there is BF16, Q4_K_M, Q8_0"),
        ("org/folder:Q4_K_M", ModelNotFoundError, "has no GGUF file: name another"),
        ("org/many", ModelNotFoundError, "name one, as in org/many:Q5_0, Q8_0"),
        ("org/empty", ModelNotFoundError, "neither config.json nor a GGUF file"),
        ("org/half", BadModelFileError, "lacks m-00002-of-00003.gguf"),
        ("org/nowhere", ModelNotFoundError, "there is no org/nowhere here or on the hub: check its spelling"),
        ("org/gated", ModelNotFoundError, "accept its terms"),
    ],
)
def test_what_there_is_is_told_before_anything_is_fetched(
    typed: str, error: type[Exception], says: str, hub: LoopbackHub
) -> None:
    hub.repos["org/many"] = {"a-Q8_0.gguf": b"GGUF", "a-Q5_0.gguf": b"GGUF"}
    hub.repos["org/empty"] = {"README.md": b""}
    hub.repos["org/half"] = {"m-00001-of-00003.gguf": b"GGUF", "m-00003-of-00003.gguf": b"GGUF"}
    hub.refused["org/gated"] = (403, "GatedRepo")
    with pytest.raises(error, match=says):
        find(typed)
    assert hub.downloads() == []


def test_of_a_folder_s_files_only_those_that_are_read_are_fetched(hub: LoopbackHub) -> None:
    files = find("org/folder")
    assert files.kind == "hf"
    assert files_in(files.path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.downloads()[-1] == "config.json"  # what makes it a model comes last


def test_a_revision_and_a_place_may_be_named(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.commit("org/folder")
    assert find("org/folder", revision=commit, download_dir=tmp_path / "own").path.name == commit
    assert (tmp_path / "own" / "models--org--folder").is_dir()
    with pytest.raises(ModelNotFoundError, match="has no revision 'v9'"):
        find("org/folder", revision="v9")


# ---- fetching ----


def test_what_was_fetched_is_found_without_a_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {typed: find(typed).path for typed in ("org/ggufs:Q8_0", "org/folder")}
    use_hub("http://127.0.0.1:9", monkeypatch)
    assert {typed: find(typed).path for typed in here} == here
    with pytest.raises(ModelNotFoundError, match="no hub could be reached.*of what is here.*there is Q8_0"):
        find("org/ggufs:Q4_K_M")
    with pytest.raises(ModelNotFoundError, match="there is no org/other here and no hub could be reached"):
        find("org/other")


@pytest.mark.parametrize("content", [b"GGUF evil", b"GGUF evil" * 1000, b"X" * len(GGUFS["model-Q8_0.gguf"])])
def test_a_file_that_is_not_the_listed_one_never_stays(content: bytes, hub: LoopbackHub, cache: Path) -> None:
    hub.served["model-Q8_0.gguf"] = content
    with pytest.raises((BadModelFileError, ModelNotFoundError)):
        find("org/ggufs:Q8_0")
    assert kept_models() == [] and not any(cache.rglob("*.gguf"))
    hub.served.clear()
    assert find("org/ggufs:Q8_0").path.read_bytes() == GGUFS["model-Q8_0.gguf"]


def test_after_a_connection_that_breaks_nothing_is_half_there(hub: LoopbackHub, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client waits between its attempts
    hub.cut_after = 100
    with pytest.raises(ModelNotFoundError):
        find("org/ggufs:Q8_0")
    assert kept_models() == []
    hub.cut_after = None
    assert find("org/ggufs:Q8_0").path.read_bytes() == GGUFS["model-Q8_0.gguf"]


def quire(hub: LoopbackHub, tmp_path: Path, *argv: str) -> subprocess.Popen[str]:
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "QUIRE_CACHE": str(tmp_path / "quire")}
    return subprocess.Popen(
        [sys.executable, "-m", "quire", *argv],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_is_interrupted_leaves_nothing_half_and_can_be_repeated(
    how: signal.Signals, hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.stalled = "model-Q8_0.gguf"
    process = quire(hub, tmp_path, "pull", "org/ggufs:Q8_0")
    assert hub.begun.wait(30)
    os.killpg(process.pid, how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert "Fetching org/ggufs:Q8_0: 1 file, 1.0 kB" in said and "Traceback" not in said
    assert kept_models() == []
    hub.stalled = None
    out, said = quire(hub, tmp_path, "pull", "org/ggufs:Q8_0").communicate(timeout=60)
    assert Path(out.strip()).read_bytes() == GGUFS["model-Q8_0.gguf"], said
    assert [model.name for model in kept_models()] == ["org/ggufs:Q8_0"]


# ---- what is kept ----


def test_what_was_fetched_is_listed_with_its_size(hub: LoopbackHub, cache: Path, capsys) -> None:
    assert run(["list"]) == 0
    assert capsys.readouterr().out.split() == ["NAME", "SIZE", "MODIFIED"]
    for typed in ("org/folder", "org/ggufs:Q8_0", "org/ggufs:BF16"):
        assert run(["pull", typed]) == 0
    capsys.readouterr()
    assert run(["ls"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["org/folder", "7.0", "kB"], ["org/ggufs:BF16", "16", "bytes"], ["org/ggufs:Q8_0", "1.0", "kB"]]
    assert run(["list", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["models"]
    assert [fact["size_bytes"] for fact in facts] == [7004, 16, 1000]
    assert all(cache in Path(fact["path"]).parents for fact in facts)


def test_one_quantization_is_removed_with_its_content_and_the_others_stay(
    hub: LoopbackHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in ("org/ggufs:Q8_0", "org/ggufs:BF16"):
        find(typed)
    assert run(["rm", "org/ggufs:bf16"]) == 0
    assert "removed org/ggufs:BF16 (16 bytes)" in capsys.readouterr().out
    assert [model.name for model in kept_models()] == ["org/ggufs:Q8_0"]
    assert len(list((cache / "models--org--ggufs" / "blobs").iterdir())) == 1
    assert find("org/ggufs:Q8_0").path.read_bytes() == GGUFS["model-Q8_0.gguf"]
    assert run(["rm", "org/ggufs:Q8_0"]) == 0
    assert not (cache / "models--org--ggufs").exists()


def test_a_content_that_two_files_share_stays_for_the_other(hub: LoopbackHub) -> None:
    hub.repos["org/twins"] = {"a-Q8_0.gguf": b"GGUF same", "a-Q4_0.gguf": b"GGUF same", "b-Q5_0.gguf": b"GGUF"}
    for label in ("Q8_0", "Q4_0", "Q5_0"):
        find(f"org/twins:{label}")
    remove("org/twins:Q8_0")
    assert find("org/twins:Q4_0").path.read_bytes() == b"GGUF same"


def test_a_name_without_a_quantization_removes_all_of_it(hub: LoopbackHub, cache: Path) -> None:
    find("org/ggufs:Q8_0")
    find("org/ggufs:BF16")
    find("org/folder")
    assert len(remove("org/ggufs")) == 2
    assert [model.name for model in kept_models()] == ["org/folder"]
    with pytest.raises(ModelNotFoundError, match="no org/ggufs here to remove"):
        remove("org/ggufs")
    with pytest.raises(ModelNotFoundError, match="no org/folder:Q8_0 here to remove"):
        remove("org/folder:Q8_0")


def test_the_built_in_model_is_listed_and_removed_by_its_name(cache: Path, monkeypatch) -> None:
    own = cache.parent / "quire" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"GGUF")
    (own.parent / "native").mkdir()
    assert [(model.name, model.size_bytes) for model in kept_models()] == [("smollm2", 4)]
    remove("smollm2")
    assert not own.exists() and (own.parent / "native").is_dir()


@pytest.mark.parametrize("typed", ["../x", "/etc/passwd", "./x.gguf", "..", "~", "x.gguf", "native", "a/../b", "", "*"])
def test_paths_are_not_names_to_remove(typed: str, cache: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x").write_text("mine")
    (tmp_path / "quire" / "native").mkdir(parents=True)
    (cache / "x").mkdir(parents=True)
    monkeypatch.chdir(cache)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="is no name that `quire list` shows"):
        remove(typed)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_lead_nobody_out_of_the_cache(hub: LoopbackHub, cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "snapshots" / "abc").mkdir(parents=True)
    precious = outside / "snapshots" / "abc" / "mine-Q8_0.gguf"
    precious.write_bytes(b"GGUF precious")
    # A repository that is a link, one whose snapshots are, and one that links to a file elsewhere.
    find("org/ggufs:Q8_0")
    (cache / "models--org--link").symlink_to(outside)
    (cache / "models--org--inner").mkdir()
    (cache / "models--org--inner" / "snapshots").symlink_to(outside / "snapshots")
    snapshot = find("org/ggufs:Q4_K_M").path.parent
    (snapshot / "mine-Q5_0.gguf").symlink_to(precious)
    assert [model.name for model in kept_models()] == ["org/ggufs:Q4_K_M", "org/ggufs:Q5_0", "org/ggufs:Q8_0"]
    with pytest.raises(ModelNotFoundError, match="no org/link here to remove"):
        remove("org/link")
    remove("org/inner")
    remove("org/ggufs:Q5_0")
    assert not (snapshot / "mine-Q5_0.gguf").is_symlink() and not (cache / "models--org--inner").exists()
    (snapshot / "sub").symlink_to(outside)
    remove("org/ggufs")
    assert precious.read_bytes() == b"GGUF precious" and (cache / "models--org--link").is_symlink()
    own = tmp_path / "quire" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    own.parent.mkdir(parents=True)
    own.symlink_to(precious)
    with pytest.raises(ModelNotFoundError):
        remove("smollm2")
    assert own.is_symlink() and precious.exists()
