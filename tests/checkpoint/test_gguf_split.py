"""Split GGUF files, written by the `gguf` package: read as one file from any part, refused where parts do not fit."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.checkpoint.find import find
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.gguf_names import models
from quire.errors import BadModelFileError, ModelError, ModelNotFoundError
from tests.checkpoint.test_gguf import header, key, tensor

WEIGHTS = {f"t{idx}": np.full((4, 8), idx, dtype=np.float32) for idx in range(5)}


def write(path: Path, weights: dict[str, np.ndarray], **options: int) -> None:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_array("tokens", ["a", "b"])
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    write(folder / "m.gguf", WEIGHTS, split_max_tensors=2)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Three parts: m-00001-of-00003.gguf and so on."""
    return Path(shutil.copytree(written, tmp_path / "split"))


def part(folder: Path, number: int) -> Path:
    return folder / f"m-{number:05}-of-00003.gguf"


def test_a_split_file_is_read_as_one_from_any_of_its_parts(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [part(folder, number).name for number in (1, 2, 3)]
    for number in (1, 2, 3):
        with GGUFFile(part(folder, number)) as file:
            assert list(file.tensors) == list(WEIGHTS) and file.metadata["tokens"] == ["a", "b"]
            assert {found.part for found in file.tensors.values()} == {0, 1, 2}
            for name, values in WEIGHTS.items():
                found = file.tensors[name]
                assert np.array_equal(np.frombuffer(file.data(found), np.float32).reshape(found.shape), values)
                file.forget(found)


def test_a_folder_of_parts_is_one_model(folder: Path) -> None:
    assert find(str(folder)).gguf.tensors.keys() == WEIGHTS.keys()
    assert find(str(part(folder, 2))).gguf.metadata["tokens"] == ["a", "b"]
    part(folder, 1).unlink()
    with pytest.raises(ModelNotFoundError, match="m-00001-of-00003.gguf is not there"):
        _ = find(str(folder)).gguf
    shutil.copy(part(folder, 2), folder / "other.gguf")
    with pytest.raises(ModelNotFoundError, match="holds 2 .gguf files"):
        find(str(folder))


def test_parts_may_be_links_as_in_a_hub_s_cache(folder: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for number in (1, 2, 3):
        blob = part(folder, number).rename(folder / f"blob{number}")
        part(links, number).symlink_to(blob)
    assert GGUFFile(part(links, 2)).tensors.keys() == WEIGHTS.keys()


def remove_one(folder: Path) -> None:
    part(folder, 2).unlink()


def remove_two(folder: Path) -> None:
    part(folder, 2).unlink()
    part(folder, 3).unlink()


def swap(folder: Path) -> None:
    part(folder, 2).rename(folder / "x")
    part(folder, 3).rename(part(folder, 2))
    (folder / "x").rename(part(folder, 3))


def duplicate(folder: Path) -> None:
    shutil.copy(part(folder, 1), part(folder, 2))


def whole_model(folder: Path) -> None:
    write(part(folder, 2), {"x": WEIGHTS["t0"]})


def of_another(folder: Path, weights: dict[str, np.ndarray]) -> None:
    other = folder / "other"
    other.mkdir()
    write(other / "m.gguf", weights, split_max_tensors=2)
    shutil.copy(part(other, 2), part(folder, 2))


def of_a_larger_model(folder: Path) -> None:
    of_another(folder, WEIGHTS | {"t5": WEIGHTS["t0"]})


def of_a_model_of_the_same_size(folder: Path) -> None:
    of_another(folder, dict(zip(["t2", "t3", "t0", "t1", "t4"], WEIGHTS.values())))


def truncate(folder: Path) -> None:
    path = part(folder, 3)
    path.write_bytes(path.read_bytes()[:-32])


def rename_all(folder: Path) -> None:
    for number in (1, 2, 3):
        part(folder, number).rename(folder / f"m-{number:05}-of-00004.gguf")
    (folder / "m-00004-of-00004.gguf").touch()


def no_numbers(folder: Path) -> None:
    remove_two(folder)
    part(folder, 1).rename(folder / "m.gguf")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_one, "of which m-00002-of-00003.gguf is not there: put all parts into one folder"),
        (remove_two, "of which m-00002-of-00003.gguf and 1 more are not there"),
        (swap, "m-00002-of-00003.gguf is not usable: it is part 3 under the name of part 2"),
        (duplicate, "m-00002-of-00003.gguf is not usable: it is part 1 under the name of part 2"),
        (whole_model, "m-00002-of-00003.gguf is not usable: it is not one of 3 parts: it belongs to another model"),
        (of_a_larger_model, r"belongs to another model than m-0000\d-of-00003.gguf .its split.tensors.count differs"),
        (of_a_model_of_the_same_size, "holds the tensor 't0', which m-00001-of-00003.gguf holds as well"),
        (truncate, "m-00003-of-00003.gguf is not usable: tensor 't4' ends at byte"),
        (rename_all, "it says that it is one of 3 parts, which is not what its name says"),
        (no_numbers, "m.gguf is one of 3 parts of a split file and its name does not say which"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parts_that_do_not_fit_are_one_sentence(damage: Callable[[Path], None], says: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=says) as caught:
        GGUFFile(min(path for path in folder.iterdir() if path.is_file()))
    assert "\n" not in str(caught.value)


def numbered(no: int, count: int, tensors: int, name: str = "t", kind: int = 2, code: str = "H") -> bytes:
    keys = (
        key("split.no", kind, struct.pack(f"<{code}", no)),
        key("split.count", kind, struct.pack(f"<{code}", count)),
        key("split.tensors.count", 5, struct.pack("<i", tensors)),
    )
    return header(keys, (tensor(name),))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (numbered(0, 2, 1), numbered(1, 2, 1, "u")),
        (numbered(0, 2, 1 << 30), numbered(1, 2, 1 << 30, "u")),
        (numbered(0, 2, -1), numbered(1, 2, -1, "u")),
        (numbered(0, 2, 2), numbered(1, 2, 2, "t")),
        (numbered(1, 2, 2), numbered(0, 2, 2, "u")),
        (numbered(0, 65535, 2), numbered(1, 65535, 2, "u")),
        (numbered(0, 1 << 63, 2, kind=10, code="Q"), b""),
        (numbered(0, 2, 2), numbered(1, -2, 2, "u", kind=3, code="h")),
        (numbered(0, 2, 2), numbered(1, 2.0, 2, "u", kind=6, code="f")),
        (numbered(0, 2, 2), numbered(1, 1, 2, "u", kind=0, code="B").replace(b"split.no", b"split.on")),
        (numbered(0, 2, 2), b"not GGUF"),
        (numbered(0, 2, 2), b""),
    ],
)
def test_headers_that_lie_about_their_parts_are_refused(first: bytes, second: bytes, tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(second)
    with pytest.raises((BadModelFileError, ModelNotFoundError)):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def test_what_all_headers_hold_together_is_bounded(tmp_path: Path) -> None:
    """The limits are those of a model: parts do not multiply them."""
    items = (1 << 22) // 2 + 1
    for no in range(2):
        keys = (
            key("split.no", 2, struct.pack("<H", no)),
            key("split.count", 2, struct.pack("<H", 2)),
            key("many", 9, struct.pack("<IQ", 0, items) + bytes(items)),
        )
        (tmp_path / f"m-{no + 1:05}-of-00002.gguf").write_bytes(header(keys, (tensor(f"t{no}"),)))
    with pytest.raises(BadModelFileError, match="array items, the limit is"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def test_a_file_that_is_its_only_part_needs_no_numbers_in_its_name(tmp_path: Path) -> None:
    for count in (0, 1):
        (tmp_path / "m.gguf").write_bytes(numbered(0, count, 1))
        assert list(GGUFFile(tmp_path / "m.gguf").tensors) == ["t"]


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bytes_of_any_part_are_refused_or_read_within_bounds(
    data: st.DataObject, written: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-split"
    folder.mkdir(exist_ok=True)
    for number in (1, 2, 3):
        content = bytearray(part(written, number).read_bytes())
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, min(len(content), 300) - 8))
            patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)])))
            content[start : start + len(patch)] = patch
        part(folder, number).write_bytes(content)
    try:
        file = GGUFFile(part(folder, data.draw(st.integers(1, 3))))
    except ModelError as error:
        assert "\n" not in str(error)
        return
    for found in file.tensors.values():
        assert len(file.data(found)) == found.nbytes
    file.close()


def test_names_tell_quantizations_and_parts() -> None:
    names = """
        llama-2-7b.Q4_K_M.gguf qwen2.5-0.5b-instruct-q8_0.gguf UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf
        UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf m-bf16.gguf gpt-mxfp4.gguf mmproj-BF16.gguf m.imatrix.gguf
        plain.gguf a-Q5_0.gguf b-Q5_0.gguf README.md
    """.split()
    found = models(names)
    assert found.keys() == {"Q4_K_M", "Q8_0", "UD-Q2_K_XL", "BF16", "MXFP4", "plain", "a-Q5_0", "b-Q5_0"}
    assert [name[-19:] for name in found["UD-Q2_K_XL"]] == [
        "L-00001-of-00002.gguf"[-19:],
        "L-00002-of-00002.gguf"[-19:],
    ]


def test_the_real_model_split_gives_the_same_tokens(smollm2: Path, tmp_path: Path) -> None:
    from gguf.scripts.gguf_new_metadata import copy_with_new_metadata

    from quire import LLM, SamplingParams

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=100)
    copy_with_new_metadata(gguf.GGUFReader(smollm2), writer, {}, [])
    assert len(list(tmp_path.iterdir())) == 3
    texts = []
    for path in (smollm2, part(tmp_path, 2)):
        with LLM(str(path), max_model_len=64, kv_cache_memory_bytes=16 << 20, num_threads=1) as llm:
            output = llm.generate(
                "The capital of France is", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
            )
            texts.append(output[0].outputs[0].text)
    assert texts[0] == texts[1] and "Paris" in texts[0]
