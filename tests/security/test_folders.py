"""Model folders, tokenizers, key files and configs made by strangers: each file replaced by what is no such file."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.checkpoint.test_gguf_split import WEIGHTS, write
from tests.frontend.test_sentencepiece_tokenizer import train
from tests.security.conftest import check
from tests.security.trial import Trial, refused

SOURCE = Path(__file__).parents[2] / "src" / "quire"

# Every file of a model folder that is looked for, and the layouts in which all of them occur.
SINGLE = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
SHARDED = [
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "chat_template.json",
]
# Where there is no tokenizer.json.
SENTENCEPIECE = ["tokenizer.model", "added_tokens.json"]
# Beside those, what is in folders and is never read.
OTHERS = """
    README.md vocab.json merges.txt tokenizer.model added_tokens.json preprocessor_config.json adapter_config.json
    modeling_custom.py pytorch_model.bin params.json quantize_config.json
""".split()


def fifo(path: Path, _: bytes) -> None:
    os.mkfifo(path)


def device(path: Path, _: bytes) -> None:
    path.symlink_to("/dev/zero")


def terminal(path: Path, _: bytes) -> None:
    path.symlink_to("/dev/ptmx")


def directory(path: Path, _: bytes) -> None:
    path.mkdir()


def unix_socket(path: Path, _: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        home = os.getcwd()
        os.chdir(path.parent)  # a socket's path may have a hundred characters
        made.bind(path.name)
        os.chdir(home)


def dangling_link(path: Path, _: bytes) -> None:
    path.symlink_to("nowhere")


def link_loop(path: Path, _: bytes) -> None:
    path.symlink_to(path.name)


def sparse_terabyte(path: Path, _: bytes) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def terabyte_behind(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.truncate(path, 1 << 40)


def truncated(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path, _: bytes) -> None:
    path.touch()


def noise(path: Path, _: bytes) -> None:
    path.write_bytes(bytes((7 * idx * idx + 13 * idx + 129) % 256 for idx in range(5000)))


def deep(path: Path, _: bytes) -> None:
    path.write_bytes(b'{"a":' + b"[" * 1_000_000)


def null(path: Path, _: bytes) -> None:
    path.write_bytes(b"null")


Kind = Callable[[Path, bytes], None]
# Not even a file of bytes.
SPECIAL: list[Kind] = [fifo, device, terminal, directory, unix_socket, dangling_link, link_loop, sparse_terabyte]
KINDS: list[Kind] = [*SPECIAL, terabyte_behind, truncated, empty, noise, deep, null]
# What is still a valid file.
HARMLESS = {
    *(("chat_template.jinja", kind) for kind in (truncated, empty, deep, null)),
    ("model.gguf", terabyte_behind),
}


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial()
    yield trial
    trial.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama) -> Path:
    """All files of SINGLE and OTHERS, small and valid."""
    made = tmp_path_factory.mktemp("valid")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(tiny_llama / name, made)
    quantization = {"quant_algo": "FP8", "exclude_modules": ["*"]}
    (made / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    tokenizer = Tokenizer(models.BPE({chr(code): code - 32 for code in range(32, 127)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text('{"eos_token": "~"}')
    (made / "special_tokens_map.json").write_text('{"eos_token": "~"}')
    (made / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    for name in OTHERS:
        (made / name).write_text("{}")
    return made


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, folder) -> Path:
    """With the weights in two files and an index, and the template as JSON."""
    from safetensors.numpy import load_file, save_file

    made = tmp_path_factory.mktemp("sharded")
    for name in set(SINGLE) - {"model.safetensors", "chat_template.jinja"}:
        shutil.copy(folder / name, made)
    tensors = load_file(folder / "model.safetensors")
    parts = {SHARDED[1]: sorted(tensors)[::2], SHARDED[2]: sorted(tensors)[1::2]}
    weight_map: dict[str, str] = {}
    for file_name, names in parts.items():
        save_file({name: tensors[name] for name in names}, made / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (made / SHARDED[0]).write_text(json.dumps({"weight_map": weight_map}))
    (made / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    return made


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory, folder) -> Path:
    made = tmp_path_factory.mktemp("sentencepiece")
    for path in folder.iterdir():
        if path.name not in ("tokenizer.json", *SENTENCEPIECE):
            shutil.copy(path, made)
    (made / "tokenizer.model").write_bytes(train(vocab_size=120, byte_fallback=False))
    (made / "added_tokens.json").write_text('{"<|im_end|>": 120}')
    return made


@pytest.fixture(scope="module")
def gguf(tmp_path_factory, smollm2) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    (made / "model.gguf").symlink_to(smollm2)
    return made


def hostile(valid: Path, name: str, kind: Kind, folder: Path) -> Path:
    """A copy of a valid folder, made of links as in hub caches, with one file replaced."""
    for path in valid.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path.resolve())
    with (valid / name).open("rb") as file:
        kind(folder / name, file.read(1 << 22))
    return folder


@pytest.mark.parametrize("layout", ["folder", "sharded", "sentencepiece", "gguf"])
def test_valid_folders_open(request, trial, layout):
    answer = trial.run(do="open_model", folder=str(request.getfixturevalue(layout)))
    check(answer["result"], answer)


def test_every_file_that_is_looked_for_is_replaced_below(trial, folder, sharded, sentencepiece):
    """Fails when another kind of file is read: add it to the lists above."""
    trial.close()
    asked: set[str] = set()
    for path in (folder, sharded, sentencepiece):
        check(trial.run(do="open_model", folder=str(path))["result"])
        asked.update(trial.run(do="asked_for", folder=str(path))["result"])
    replaced = {*SINGLE, *SHARDED, *SENTENCEPIECE}
    check(asked == replaced, asked ^ replaced)


def test_files_are_opened_in_one_place():
    """Fails when somebody opens a file of a model by themselves: use quire.utils.files."""
    opens = re.compile(
        r"(?<![\w.])open\(|\.open\(\s*[\"']|\.read_text\(|\.read_bytes\(\)|\.from_file\(|from_pretrained\("
    )
    rooms = {"checkpoint", "frontend", "config", "api", "models", "worker", "registry.py"}
    # A wheel and a lock in our own cache; our own source; files of our own page.
    allowed = {"checkpoint/fetch.py", "registry.py", "api/server/ui.py"}
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines() if "def open(" not in line)
        if name.split("/")[0] in rooms and opens.search(code):
            found.add(name)
    check(found <= allowed, found - allowed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("folder", name) for name in SINGLE),
        *(("sharded", name) for name in SHARDED),
        *(("sentencepiece", name) for name in SENTENCEPIECE),
        ("gguf", "model.gguf"),
    ],
    ids=str,
)
def test_a_hostile_file_is_one_sentence(request, trial, tmp_path, layout, name, kind):
    made = hostile(request.getfixturevalue(layout), name, kind, tmp_path)
    answer = trial.run(do="open_model", folder=str(made))
    if (name, kind) in HARMLESS:
        check(answer["seconds"] < 3 and answer["grown_mb"] < 256, answer)
        check(answer["kind"] is None or "QuireError" in answer["kind"], answer)
        return
    said = refused(answer, "ModelError", "ConfigError")
    check(name in said or "GGUF" in said or "template" in said, said)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not terabyte_behind], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_hostile_part_of_a_split_file_is_one_sentence(trial, tmp_path, kind, number):
    write(tmp_path / "m.gguf", WEIGHTS, split_max_tensors=3)
    replaced = tmp_path / f"m-{number:05}-of-00002.gguf"
    content = replaced.read_bytes()
    replaced.unlink()
    kind(replaced, content)
    for given in (1, 2):
        said = refused(trial.run(do="open_tokenizer", path=str(tmp_path / f"m-{given:05}-of-00002.gguf")), "ModelError")
        check(replaced.name in said, said)


@pytest.mark.parametrize("kind", SPECIAL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("read_yaml", "ConfigError"),
        ("read_keys", "ConfigError"),
        ("read_template", "ConfigError"),
        ("open_tokenizer", "ModelError"),
        ("open_model", "ModelError"),
    ],
)
def test_files_that_are_named_by_flags_are_looked_at_too(trial, tmp_path, kind, do, error):
    kind(tmp_path / "it", b"")
    argument = "folder" if do == "open_model" else "path"
    refused(trial.run(do=do, **{argument: str(tmp_path / "it")}), error)


def test_a_file_nobody_may_read_is_one_sentence(trial, tmp_path, folder):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    made = hostile(folder, "model.safetensors", empty, tmp_path)
    (made / "model.safetensors").chmod(0)
    check("ermission" in refused(trial.run(do="open_model", folder=str(made))))


def quire(*args: str) -> tuple[int, str, float]:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "quire", *args], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, time.monotonic() - started


def test_12_quire_info_on_a_folder_whose_weights_are_a_fifo(tmp_path, folder):
    code, said, _ = quire("info", str(hostile(folder, "model.safetensors", fifo, tmp_path)))
    check(code == 3, (code, said))
    check("model.safetensors" in said and "FIFO" in said and said.strip().count("\n") == 0, said)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.safetensors", fifo),
        ("tokenizer.json", device),
        ("config.json", dangling_link),
        ("chat_template.jinja", sparse_terabyte),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_quire_serve_on_a_hostile_folder_ends_with_one_sentence(tmp_path, folder, name, kind):
    code, said, seconds = quire("serve", str(hostile(folder, name, kind, tmp_path)), "--port", "0", "--device", "cpu")
    check(code == 3, (code, said))
    check("Traceback" not in said and name in said, said)
    check(seconds < 40, seconds)
