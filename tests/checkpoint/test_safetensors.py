"""The safetensors lister against files saved by the `safetensors` package, and against files that mean harm."""

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.checkpoint.safetensors import SafetensorsFolder
from quire.errors import BadModelFileError, ModelNotFoundError, UnsupportedModelError

WEIGHTS = {
    "norm": np.arange(5, dtype=np.float32),
    "embedding": np.arange(12, dtype=np.float16).reshape(3, 4),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(7, np.int64),
    "mask": np.array([True, False]),
}
INDEX = "model.safetensors.index.json"


def check(folder: Path, weights: dict[str, np.ndarray]) -> None:
    with SafetensorsFolder(folder) as files:
        assert set(files.tensors) == set(weights)
        for name, weight in weights.items():
            found = files.tensors[name]
            assert found.shape == weight.shape
            assert files.data(found).readonly
            assert bytes(files.data(found)) == weight.tobytes()


def test_one_file_is_listed_and_read_without_a_copy(tmp_path: Path) -> None:
    safetensors.numpy.save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "np"})
    check(tmp_path, WEIGHTS)
    dtypes = {name: tensor.dtype for name, tensor in SafetensorsFolder(tmp_path).tensors.items()}
    assert dtypes == {"norm": "F32", "embedding": "F16", "empty": "F32", "scalar": "I64", "mask": "BOOL"}


def test_files_without_an_index_are_read_as_one(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"norm": WEIGHTS["norm"]}, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"mask": WEIGHTS["mask"]}, tmp_path / "b.safetensors")
    check(tmp_path, {name: WEIGHTS[name] for name in ("norm", "mask")})


def test_a_second_layout_beside_the_usual_name_is_left_alone(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"norm": WEIGHTS["norm"]}, tmp_path / "model.safetensors")
    safetensors.numpy.save_file({"norm": WEIGHTS["mask"]}, tmp_path / "consolidated.safetensors")
    check(tmp_path, {"norm": WEIGHTS["norm"]})


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"norm": WEIGHTS["norm"]}, tmp_path / "model-1.safetensors")
    safetensors.numpy.save_file({"mask": WEIGHTS["mask"]}, tmp_path / "model-2.safetensors")
    safetensors.numpy.save_file({"norm": WEIGHTS["mask"]}, tmp_path / "stray.safetensors")
    weight_map = {"norm": "model-1.safetensors", "mask": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    check(tmp_path, {name: WEIGHTS[name] for name in ("norm", "mask")})


def test_pages_that_were_forgotten_are_read_again(tmp_path: Path) -> None:
    weights = {"a": np.arange(10_000, dtype=np.float32), "b": WEIGHTS["norm"]}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as files:
        for name, weight in weights.items():
            files.forget(files.tensors[name])
            assert bytes(files.data(files.tensors[name])) == weight.tobytes()


def test_a_view_outlives_the_folder_it_came_from(tmp_path: Path) -> None:
    safetensors.numpy.save_file(WEIGHTS, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as files:
        view = files.data(files.tensors["norm"])
    assert np.array_equal(np.frombuffer(view, np.float32), WEIGHTS["norm"])


# ---- what must be refused ----


@pytest.mark.parametrize(
    "weight_map",
    [
        {"norm": "../model.safetensors"},
        {"norm": "/etc/model.safetensors"},
        {"norm": "..\\model.safetensors"},
        {"norm": "a\0.safetensors"},
        {"norm": "model.bin"},
        {"norm": 3},
        {"norm": ["model.safetensors"]},
        {"missing": "model.safetensors"},
        {},
        [],
        None,
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(weight_map: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (tmp_path, folder):
        safetensors.numpy.save_file({"norm": WEIGHTS["norm"]}, place / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadModelFileError, match="index.json is not usable"):
        SafetensorsFolder(folder)


def test_an_index_that_names_a_missing_file_is_told_so(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ModelNotFoundError, match="model-1.safetensors"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"weight_map": {}, "weight_map": {}}'])
def test_an_index_that_is_no_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(BadModelFileError):
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        safetensors.numpy.save_file({"norm": WEIGHTS["norm"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(BadModelFileError, match="as well"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedModelError, match="convert them to safetensors"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_weights_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no safetensors file"):
        SafetensorsFolder(tmp_path)


def raw(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = [2], data_offsets: Any = [0, 8]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


FLAWS = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "a header longer than the file": raw({"a": entry()}, length=1 << 20),
    "a header of 2^64 bytes": raw({"a": entry()}, length=(1 << 64) - 1),
    "a header that is not JSON": raw(b"{"),
    "a header that is a list": raw(b"[]"),
    "a header that is not UTF-8": raw(b'{"\xff": 1}'),
    "a header nested beyond reason": raw(b"[" * 100_000),
    "a name twice": raw(b'{"a": 1, "a": 1}'),
    "an entry that is a number": raw({"a": 1}),
    "an entry without a type": raw({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "a shape that is a number": raw({"a": entry(shape=2)}),
    "a negative size": raw({"a": entry(shape=[-2, -1])}),
    "a size that is true": raw({"a": entry(shape=[True, 2])}),
    "a size that is a fraction": raw({"a": entry(shape=[2.0])}),
    "a hundred dimensions": raw({"a": entry(shape=[1] * 100 + [2])}),
    "a size of 2^70": raw({"a": entry(shape=[1 << 70])}),
    "sizes whose product overflows": raw({"a": entry(shape=[1 << 62, 1 << 62])}),
    "one offset": raw({"a": entry(data_offsets=[0])}),
    "a negative offset": raw({"a": entry(data_offsets=[-8, 0])}),
    "offsets in reverse": raw({"a": entry(data_offsets=[8, 0])}),
    "offsets that are text": raw({"a": entry(data_offsets=["0", "8"])}),
    "an end past the end": raw({"a": entry(shape=[4], data_offsets=[0, 16])}),
    "bytes that are not the shape": raw({"a": entry(shape=[3])}),
    "a gap before": raw({"a": entry(shape=[1], data_offsets=[4, 8])}),
    "bytes that are nobody's": raw({"a": entry()}, bytes(16)),
    "an overlap": raw({"a": entry(), "b": entry(shape=[1], data_offsets=[4, 8])}),
    "the same place": raw({"a": entry(), "b": entry()}),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_damaged_or_hostile_file_is_refused(flaw: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(FLAWS[flaw])
    start = time.process_time()
    with pytest.raises(BadModelFileError, match=r"model\.safetensors is"):
        SafetensorsFolder(tmp_path)
    assert time.process_time() - start < 1


def test_the_file_that_the_flaws_are_made_from_is_sound(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"a": entry()}))
    check(tmp_path, {"a": np.zeros(2, np.float32)})


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"a": entry(dtype="F6_E2M3")}))
    with pytest.raises(UnsupportedModelError, match="F6_E2M3"):
        SafetensorsFolder(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = safetensors.numpy.save(WEIGHTS)
    for length in range(len(content)):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(BadModelFileError):
            SafetensorsFolder(tmp_path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    folder = tmp_path_factory.mktemp("safetensors")

    def write(content: bytes) -> Path:
        (folder / "model.safetensors").write_bytes(content)
        return folder

    return write


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_we_accept_the_safetensors_package_accepts_too(
    data: st.DataObject, scratch: Callable[[bytes], Path]
) -> None:
    content = bytearray(safetensors.numpy.save(WEIGHTS))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=2), st.sampled_from([b"0", b"9", b"-", b'"', b"]"])))
        content[start : start + len(patch)] = patch
    folder = scratch(bytes(content))
    try:
        files = SafetensorsFolder(folder)
    except (BadModelFileError, UnsupportedModelError):
        return
    with files, safetensors.safe_open(folder / "model.safetensors", "np") as truth:
        assert set(files.tensors) == set(truth.keys())
        for name, tensor in files.tensors.items():
            assert list(tensor.shape) == truth.get_slice(name).get_shape()
            assert len(files.data(tensor)) == tensor.nbytes
