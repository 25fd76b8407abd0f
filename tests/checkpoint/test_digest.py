"""Machines that hold the same model have the same digest; those that do not, another."""

import pytest

from quire.checkpoint.digest import HEADER_BYTES, model_digest


def folder(path, **files: bytes):
    path.mkdir()
    for name, content in {"config": b"{}", "tokenizer": b"{}", **files}.items():
        (path / f"{name}.json").write_bytes(content)
    (path / "model.safetensors").write_bytes(bytes(1000) + b"weights")
    return path


def test_copies_are_the_same_whatever_lies_beside_them(tmp_path):
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other")
    (other / "README.md").write_text("a model")
    assert model_digest(str(one)) == model_digest(str(other))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_byte_that_differs_is_seen(tmp_path, name):
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other")
    content = bytearray((other / name).read_bytes())
    content[-1] ^= 1
    (other / name).write_bytes(content)
    assert model_digest(str(one)) != model_digest(str(other))


def test_a_file_that_was_cut_short_or_is_missing_is_seen(tmp_path):
    found = set()
    for idx, change in enumerate((lambda path: None, lambda path: path.write_bytes(bytes(1000)), lambda p: p.unlink())):
        path = folder(tmp_path / str(idx))
        change(path / "model.safetensors")
        found.add(model_digest(str(path)))
    assert len(found) == 3


def test_of_large_files_places_are_read(tmp_path):
    path, size = tmp_path / "model.gguf", HEADER_BYTES + (64 << 20)
    with path.open("wb") as file:
        file.truncate(size)
    before = model_digest(str(path))
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"1")
    assert model_digest(str(path)) != before


def test_all_parts_of_a_split_file_count(tmp_path):
    parts = [tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = model_digest(str(parts[0]))
    parts[1].write_bytes(b"gguf")
    assert model_digest(str(parts[0])) != before
    parts[1].unlink()
    with pytest.raises(OSError):
        model_digest(str(parts[0]))


def test_where_there_is_no_model_there_is_no_digest(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "missing.gguf"):
        with pytest.raises(OSError):
            model_digest(str(path))
