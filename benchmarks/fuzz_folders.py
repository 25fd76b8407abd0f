"""Model folders in which a file is damaged: a pipe, a device, a link, a sparse terabyte, or cut or changed.

Used by `fuzz.py`. `quire info`, and now and then `quire serve`, must either work or say in one sentence what is wrong,
soon and in little memory.
"""

import json
import math
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.server_process import free_port
from quire.models.llama import TINY

Case = dict[str, Any]

MAX_EDITED_BYTES = 1 << 28
LIMIT_S = 30.0
LIMIT_BYTES = 2 << 30
SPARSE_BYTES = 1 << 40
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
]
JSON_FILES = [name for name in FILES if name.endswith(".json")]
# Ways to put something else in a file's place.
WAYS = "fifo device endless directory dangling loop sparse empty missing unreadable socket".split()
VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1e308, 5e-324),
    *("", "x", "../../x", [], {}, [[]], ["x"] * 1000, {"a": {"a": {}}}, "9" * 5000),
]
BOMBS = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep maps": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "many": json.dumps({f"k{idx}": idx for idx in range(200_000)}),
    "digits": '{"vocab_size": ' + "9" * 100_000 + "}",
    "no text": "\ufeff\0\0",
    "a list": "[]",
    "a number": "1",
    "NaN": '{"rms_norm_eps": NaN, "rope_theta": Infinity}',
}
TEMPLATES = [
    "{% for x in range(10**9) %}{{ x }}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ 'x' * 10**9 }}",
    "{% if %}",
    "{{ " * 10_000,
    "{% include '/etc/passwd' %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "\0",
    "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}{% endfor %}{% endfor %}",
]


def make_folder(folder: Path) -> Path:
    """A tiny Llama of random weights with a tokenizer of bytes: nothing in it is odd."""
    folder.mkdir(parents=True)
    config = TINY | {"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "bos_token": "<b>"}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    special = {"<u>": 0, "<b>": 1, "<e>": 2}
    vocab = special | {chr(0x21 + idx): 3 + idx for idx in range(200)}
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": idx, "content": word} | flags for word, idx in special.items()]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<u>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    _write_safetensors(folder / "model.safetensors", _shapes())
    return folder


def _shapes() -> dict[str, list[int]]:
    hidden = TINY["hidden_size"]
    inner = TINY["intermediate_size"]
    queries = TINY["num_attention_heads"] * TINY["head_dim"]
    keys = TINY["num_key_value_heads"] * TINY["head_dim"]
    layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    shapes = {
        "model.embed_tokens.weight": [TINY["vocab_size"], hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [TINY["vocab_size"], hidden],
    }
    for idx in range(TINY["num_hidden_layers"]):
        shapes |= {f"model.layers.{idx}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    rng = random.Random(0)
    header: dict[str, Any] = {}
    data = bytearray()
    for name, shape in shapes.items():
        size = math.prod(shape)
        start = len(data)
        data += struct.pack(f"<{size}f", *(rng.uniform(-0.1, 0.1) for _ in range(size)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# -- a case ------------------------------------------------------------------------------------------------------------


def folder_cases() -> st.SearchStrategy:
    files = st.sampled_from(FILES)
    json_files = st.sampled_from(JSON_FILES)
    weights = st.just("model.safetensors")
    template = st.just("chat_template.jinja")
    where = st.floats(0, 1)
    flips = st.lists(st.tuples(where, st.integers(0, 255)).map(list), min_size=1, max_size=8)
    other_keys = "torch_dtype eos_token_id rope_scaling quantization_config auto_map temperature model added_tokens"
    keys = st.sampled_from(sorted(TINY) + other_keys.split())
    fields = st.sampled_from(["dtype", "shape", "data_offsets"])
    field_values = [*VALUES, [0, 0], [-1, 5], [2**63, 1], [2**32, 2**32], [5, 1], "F64", "I8", [0, 2**62]]
    lengths = st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])
    weight_maps = st.sampled_from([*VALUES, {"x": "../../etc/passwd"}, {"x": "/dev/zero"}])
    damage = st.one_of(
        st.fixed_dictionaries({"file": files, "way": st.sampled_from(WAYS)}),
        _edits("cut", files, where=where),
        _edits("flips", files, flips=flips),
        _edits("value", json_files, key=keys, value=st.sampled_from(VALUES)),
        _edits("bomb", json_files, bomb=st.sampled_from(sorted(BOMBS))),
        _edits("template", template, template=st.sampled_from(TEMPLATES)),
        _edits("header", weights, length=lengths),
        _edits("tensor", weights, field=fields, value=st.sampled_from(field_values)),
        _edits("index", weights, value=weight_maps),
    )
    return st.fixed_dictionaries(
        {"damage": st.lists(damage, min_size=1, max_size=2), "command": st.sampled_from(["info"] * 7 + ["serve"])}
    )


def _edits(way: str, files: st.SearchStrategy, **details: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({"file": files, "way": st.just(way), **details})


def apply(folder: Path, damage: Case) -> None:
    path, way = folder / damage["file"], damage["way"]
    if way in WAYS:
        _remove(path)
        _make_odd_file(path, way)
        return
    match way:
        case "cut":
            data = _read_small(path)
            path.write_bytes(data[: int(len(data) * damage["where"])])
        case "flips":
            _flip_bytes(path, damage["flips"])
        case "value":
            _set_value(path, damage["key"], damage["value"])
        case "bomb":
            _replace(path, BOMBS[damage["bomb"]].encode("utf-8", "surrogatepass"))
        case "template":
            _replace(path, damage["template"].encode())
        case "header":
            _replace(path, struct.pack("<Q", damage["length"]) + _read_small(path)[8:])
        case "tensor":
            _set_tensor_field(path, damage["field"], damage["value"])
        case "index":
            _replace(folder / "model.safetensors.index.json", json.dumps({"weight_map": damage["value"]}).encode())


def _make_odd_file(path: Path, way: str) -> None:
    match way:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/null")
        case "endless":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to(path.parent / "nothing")
        case "loop":
            path.symlink_to(path.name)
        case "sparse":
            path.touch()
            os.truncate(path, SPARSE_BYTES)
        case "empty":
            path.touch()
        case "unreadable":
            path.touch(mode=0)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))


def _flip_bytes(path: Path, flips: list[tuple[float, int]]) -> None:
    data = bytearray(_read_small(path))
    head = min(len(data), 4096)  # the part that tells how the rest is to be read
    for where, byte in flips:
        if head:
            data[min(int(head * where), head - 1)] = byte
    path.write_bytes(data)


def _set_value(path: Path, key: str, value: Any) -> None:
    try:
        values = json.loads(_read_small(path))
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        values[key] = value
    path.write_text(json.dumps(values))


def _set_tensor_field(path: Path, field: str, value: Any) -> None:
    data = _read_small(path)
    if len(data) < 8:
        return
    size = struct.unpack("<Q", data[:8])[0]
    try:
        header = json.loads(data[8 : 8 + size])
        header["lm_head.weight"][field] = value
    except (ValueError, KeyError, TypeError):
        return
    text = json.dumps(header).encode()
    _replace(path, struct.pack("<Q", len(text)) + text + data[8 + size :])


def _read_small(path: Path) -> bytes:
    """The file's content; empty where there is none, or where an earlier damage made it a terabyte."""
    is_small = path.is_file() and path.stat().st_size <= MAX_EDITED_BYTES
    return path.read_bytes() if is_small else b""


def _replace(path: Path, data: bytes) -> None:
    _remove(path)
    path.write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def play(case: Case, sound: Path) -> str:
    """Damages a copy of the sound folder, runs the command on it and says what was wrong; empty if nothing was."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as parent:
        folder = Path(parent) / "model"
        shutil.copytree(sound, folder)
        for damage in case["damage"]:
            apply(folder, damage)
        return _serve(folder) if case["command"] == "serve" else _info(folder)


def _info(folder: Path) -> str:
    code, said, seconds, num_bytes = run([sys.executable, "-m", "quire", "info", str(folder)])
    return judge(code, said, seconds, num_bytes, folder)


def _serve(folder: Path) -> str:
    """It refuses to start, or it answers."""
    port = free_port()
    flags = "--kv-cache-memory-bytes 16M --num-threads 1 --no-standby --startup-timeout-s 25".split()

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2)
        except (OSError, urllib.error.HTTPError):
            return False
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=10)
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return False
        return True

    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", str(port), *flags]
    code, said, seconds, num_bytes = run(command, answers)
    return judge(code, said, seconds, num_bytes, folder)


def run(command: list[str], is_up: Callable[[], bool] | None = None) -> tuple[int | None, str, float, int]:
    """(exit code, None when it had to be killed; what it said; seconds; most memory it had).

    A server is stopped as soon as it is up.
    """
    started = time.monotonic()
    most_bytes = 0
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while (code := process.poll()) is None and time.monotonic() - started < LIMIT_S:
                most_bytes = max(most_bytes, _memory(process.pid))
                if most_bytes > LIMIT_BYTES:
                    break
                if is_up is not None and is_up():
                    process.terminate()
                    is_up = None
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
        output.seek(0)
        return code, output.read(), time.monotonic() - started, most_bytes


def _memory(pid: int) -> int:
    """Of its own, in bytes: without the files it maps."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def judge(code: int | None, said: str, seconds: float, num_bytes: int, folder: Path) -> str:
    shown = said.strip().replace(str(folder), "FOLDER")
    if num_bytes > LIMIT_BYTES:
        return "it took more than 2 GB"
    if code is None:
        return f"it had not ended after {seconds:.0f} s: {shown[-300:]}"
    if "Traceback" in said:
        return f"a traceback: {shown[-400:]}"
    last = shown.splitlines()[-1] if shown else ""
    if code < 0:
        return f"it was ended by signal {-code}: {shown[-300:]}"
    if code and not last.startswith("quire: "):
        return f"exit code {code} without a sentence: {shown[-300:]}"
    says_too_much = len(last) > 600 or str(folder.parent) in last
    if code and says_too_much:
        return f"the sentence says too much: {last[:700]}"
    return ""
