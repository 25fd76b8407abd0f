"""The GGUF reader against the `gguf` package's writer, and against files that mean harm."""

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.checkpoint.find import find
from quire.checkpoint.gguf import GGUFFile, GGUFTensor
from quire.errors import BadModelFileError, ModelNotFoundError, UnsupportedModelError

WEIGHTS = {
    "norm": np.arange(5, dtype=np.float32),
    "embedding": np.arange(12, dtype=np.float16).reshape(3, 4),
    "cube": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
}
QUANTIZED = gguf.quants.quantize(
    np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q4_1
)
VALUES = {
    "u8": (200, "UINT8"),
    "i8": (-100, "INT8"),
    "u16": (60000, "UINT16"),
    "i16": (-30000, "INT16"),
    "u32": (4_000_000_000, "UINT32"),
    "i32": (-2_000_000_000, "INT32"),
    "u64": (1 << 63, "UINT64"),
    "i64": (-(1 << 62), "INT64"),
    "f32": (0.5, "FLOAT32"),
    "f64": (0.1, "FLOAT64"),
    "yes": (True, "BOOL"),
    "no": (False, "BOOL"),
    "text": ("caffè \U0001f999", "STRING"),
}
ARRAYS = {"tokens": ["a", "ü", "<s>"], "types": [1, -2, 3], "scores": [0.5, -1.0], "flags": [True, False]}


def write_small(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind) in VALUES.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for key, array in ARRAYS.items():
        writer.add_array(key, array)
    for name, weight in WEIGHTS.items():
        writer.add_tensor(name, weight)
    writer.add_tensor("packed", QUANTIZED, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_small(path)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    path = tmp_path_factory.mktemp("gguf") / "scratch.gguf"

    def write(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return write


# ---- files made by hand, one flaw at a time ----


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "t", dims: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def header(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: bytes = bytes(256),
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


HUGE = (1 << 64) - 1
FLAWS = {
    "no magic": header(magic=b"GGML"),
    "more tensors than fit": header(num_tensors=1000),
    "absurdly many tensors": header(num_tensors=HUGE),
    "more keys than fit": header(num_keys=1000),
    "absurdly many keys": header(num_keys=HUGE),
    "an empty key": header((key("", 0, b"\1"),)),
    "a key twice": header((key("a", 0, b"\1"), key("a", 0, b"\2"))),
    "a key past the end": header(num_keys=1, data=struct.pack("<Q", HUGE) + bytes(64)),
    "a key that is not UTF-8": header((struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 0) + b"\1",)),
    "a value of unknown type": header((key("a", 13, b"\1"),)),
    "a string past the end": header((key("a", 8, struct.pack("<Q", 1 << 40)),)),
    "a string that is not UTF-8": header((key("a", 8, text(b"\xff")),)),
    "a boolean of 2": header((key("a", 7, b"\2"),)),
    "an array of unknown type": header((key("a", 9, struct.pack("<IQ", 13, 1) + b"\0"),)),
    "an array longer than the file": header((key("a", 9, struct.pack("<IQ", 0, 1 << 20)),)),
    "an absurdly long array": header((key("a", 9, struct.pack("<IQ", 12, HUGE)),)),
    "an array of strings that do not fit": header((key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + b"\xff" * 8),)),
    "nested arrays": header((key("a", 9, struct.pack("<IQIQ", 9, 1, 0, 1) + b"\0"),)),
    "an alignment of 0": header((key("general.alignment", 4, struct.pack("<I", 0)),), (tensor(),)),
    "an alignment of 48": header((key("general.alignment", 4, struct.pack("<I", 48)),), (tensor(),)),
    "an alignment of 2^31": header((key("general.alignment", 4, struct.pack("<I", 1 << 31)),), (tensor(),)),
    "an alignment that is text": header((key("general.alignment", 8, text("32")),), (tensor(),)),
    "a tensor twice": header((), (tensor(), tensor(offset=32))),
    "no dimensions": header((), (tensor(dims=()),)),
    "five dimensions": header((), (tensor(dims=(1, 1, 1, 1, 8)),)),
    "an empty dimension": header((), (tensor(dims=(8, 0)),)),
    "dimensions whose product overflows": header((), (tensor(dims=(1 << 63, 1 << 63, 2)),)),
    "half a block": header((), (tensor(dims=(48,), type_id=3),)),
    "an unknown tensor type": header((), (tensor(type_id=99),)),
    "a removed tensor type": header((), (tensor(type_id=4),)),
    "an offset that is not aligned": header((), (tensor(offset=4),)),
    "an offset past the end": header((), (tensor(offset=1 << 20),)),
    "an offset that overflows": header((), (tensor(offset=HUGE - 31),)),
    "a tensor that ends past the end": header((), (tensor(dims=(65,)),)),
    "tensors that overlap": header((), (tensor("a", (16,)), tensor("b", (8,), offset=32))),
    "tensors at the same place": header((), (tensor("a"), tensor("b"))),
    "nothing": b"",
    "only a magic": b"GGUF",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_damaged_or_hostile_file_is_refused_cheaply(flaw: str, scratch: Callable[[bytes], Path]) -> None:
    path = scratch(FLAWS[flaw])
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(BadModelFileError, match=r"scratch\.gguf is"):
        GGUFFile(path)
    assert time.process_time() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_file_that_the_flaws_are_made_from_is_sound(scratch: Callable[[bytes], Path]) -> None:
    file = GGUFFile(
        scratch(header((key("a", 0, b"\1"),), (tensor("a", (16,)), tensor("b", (32,), type_id=3, offset=64))))
    )
    assert file.metadata == {"a": 1}
    assert [(t.type_name, t.nbytes) for t in file.tensors.values()] == [("F32", 64), ("Q4_1", 20)]


def test_a_sparse_file_as_large_as_a_disk_is_refused_as_cheaply(tmp_path: Path) -> None:
    for counts in [(1 << 17, 0), (0, 1 << 16), (1 << 30, 1 << 30)]:
        path = tmp_path / "sparse.gguf"
        with path.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, *counts))
            file.truncate(1 << 36)
        start = time.process_time()
        with pytest.raises(BadModelFileError):
            GGUFFile(path)
        assert time.process_time() - start < 3


@pytest.mark.parametrize("type_id", [9, 16, 21, 27, 40])
def test_a_valid_type_we_cannot_compute_with_is_named(type_id: int, scratch: Callable[[bytes], Path]) -> None:
    path = scratch(header((), (tensor(dims=(256,), type_id=type_id),), data=bytes(4096)))
    with pytest.raises(UnsupportedModelError, match=gguf.GGMLQuantizationType(type_id).name):
        GGUFFile(path)


@pytest.mark.parametrize(("version", "says"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")])
def test_other_versions_are_named(version: int, says: str, scratch: Callable[[bytes], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        GGUFFile(scratch(header(version=version)))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(BadModelFileError, match="a directory, not a regular file"):
        GGUFFile(tmp_path)


# ---- files made by the format's own writer ----


def test_values_of_every_type_come_back(small: Path) -> None:
    metadata = GGUFFile(small).metadata
    for name, (value, kind) in VALUES.items():
        assert metadata[name] == value and type(metadata[name]) is type(value), kind
    for name, array in ARRAYS.items():
        assert metadata[name] == array


def test_tensors_come_back_in_row_major_order_and_without_a_copy(small: Path) -> None:
    with GGUFFile(small) as file:
        for name, weight in WEIGHTS.items():
            found = file.tensors[name]
            assert found.shape == weight.shape
            assert np.array_equal(np.frombuffer(file.data(found), weight.dtype).reshape(found.shape), weight)
        assert (file.tensors["packed"].type_name, file.tensors["packed"].shape) == ("Q4_1", (2, 64))
        assert bytes(file.data(file.tensors["packed"])) == QUANTIZED.tobytes()
        assert file.data(file.tensors["norm"]).readonly


def test_version_2_and_another_alignment_are_read(small: Path, scratch: Callable[[bytes], Path]) -> None:
    file = GGUFFile(scratch(header((), (tensor(),), version=2)))
    assert file.tensors["t"].shape == (8,)
    keys = (key("general.alignment", 4, struct.pack("<I", 8)),)
    file = GGUFFile(scratch(header(keys, (tensor(), tensor("u", offset=40)))))
    assert file.tensors["u"].offset - file.tensors["t"].offset == 40


def test_a_view_outlives_the_file_it_came_from(small: Path) -> None:
    with GGUFFile(small) as file:
        view = file.data(file.tensors["norm"])
    assert np.array_equal(np.frombuffer(view, np.float32), WEIGHTS["norm"])


def test_every_truncation_is_refused(small: Path, scratch: Callable[[bytes], Path]) -> None:
    content = small.read_bytes()
    end = max(t.offset + t.nbytes for t in GGUFFile(small).tensors.values())
    for length in range(end):
        with pytest.raises(BadModelFileError):
            GGUFFile(scratch(content[:length]))


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bytes_are_refused_or_read_within_bounds(
    data: st.DataObject, small: Path, scratch: Callable[[bytes], Path]
) -> None:
    content = bytearray(small.read_bytes())
    header_end = min(t.offset for t in GGUFFile(small).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, header_end - 8))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)])))
        content[start : start + len(patch)] = patch
    try:
        file = GGUFFile(scratch(bytes(content)))
    except (BadModelFileError, UnsupportedModelError):
        return
    for found in file.tensors.values():
        assert len(file.data(found)) == found.nbytes
    file.close()


# ---- the real model ----


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return find("smollm2").path


def test_the_real_model_opens_fast_and_holds_what_it_should(smollm2: Path) -> None:
    took_s = []
    for _ in range(3):
        start = time.process_time()
        file = GGUFFile(smollm2)
        took_s.append(time.process_time() - start)
    assert min(took_s) < 0.2
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    assert len(file.tensors) == 272
    ffn_up = file.tensors["blk.0.ffn_up.weight"]
    nbytes = 1536 * 576 // 32 * 20
    assert ffn_up == GGUFTensor("blk.0.ffn_up.weight", "Q4_1", (1536, 576), ffn_up.offset, nbytes)
    assert max(tensor.offset + tensor.nbytes for tensor in file.tensors.values()) <= smollm2.stat().st_size


def test_the_vocabulary_can_be_forgotten(smollm2: Path) -> None:
    with GGUFFile(smollm2) as file:
        before = set(file.metadata)
        file.forget_vocabulary()
        gone = before - set(file.metadata)
        assert "tokenizer.ggml.tokens" in gone and all(key.startswith("tokenizer.") for key in gone)
        assert file.metadata["general.architecture"] == "llama"


def test_pages_that_were_forgotten_are_read_again(smollm2: Path) -> None:
    with GGUFFile(smollm2) as file:
        found = file.tensors["blk.0.ffn_up.weight"]
        before = bytes(file.data(found))
        file.forget(found)
        assert bytes(file.data(found)) == before
        file.forget(file.tensors["output_norm.weight"])  # smaller than a page


@pytest.mark.parametrize("length", [3, 100, 50_000, 1_000_000, 1_800_000, 2_000_000])
def test_the_real_model_truncated_is_refused(length: int, smollm2: Path, scratch: Callable[[bytes], Path]) -> None:
    with smollm2.open("rb") as file:
        content = file.read(length)
    with pytest.raises(BadModelFileError, match="truncated|the file at byte"):
        GGUFFile(scratch(content))
