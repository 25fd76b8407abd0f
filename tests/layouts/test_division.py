"""Where weights are cut: between blocks if that leaves ranks about equal; what is said where blocks would be cut."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from quire import LLM
from quire.checkpoint.find import find
from quire.checkpoint.hf_config import read_config
from quire.config import EngineConfig
from quire.config.resolve import Machine, resolve
from quire.distributed.base import Group, Ranks
from quire.errors import UnsupportedModelError
from quire.models.llama import TINY as LLAMA
from quire.quant.base import even
from quire.worker.worker import Worker
from tests.quant.published.common import SIZES
from tests.quant.test_dummy import FORMS
from tests.worker.test_load import write_gguf


@pytest.mark.parametrize(
    ("size", "num_ranks", "widths"),
    [
        (4096, 4, [1024] * 4),
        (18944, 8, [2368] * 8),
        (1408, 8, [128, 192, 192, 192, 128, 192, 192, 192]),
        (2880, 4, [704, 704, 704, 768]),
        (29568, 8, [3584, *[3712] * 7]),
        (96, 2, [48, 48]),
        (128, 3, [32, 32, 64]),
        (97, 2, [48, 49]),
    ],
)
def test_parts_are_whole_blocks_if_that_leaves_them_about_equal(size, num_ranks, widths):
    section = even(size)
    assert [section.width(rank, num_ranks) for rank in range(num_ranks)] == widths
    shares = [section.share(rank, num_ranks) for rank in range(num_ranks)]
    assert all(end == first for (_, end, _), (first, _, _) in pairwise(shares))


def workers(path: str, num_ranks: int, **options: object) -> Iterator[Worker]:
    """That of each rank, here, one after the other."""
    asked = EngineConfig.from_kwargs(
        device="cpu", max_model_len=64, num_threads=1, tensor_parallel_size=num_ranks, **options
    )
    files = find(path)
    config = resolve(asked, path, files.kind, read_config(files), Machine(num_cores=1))
    for rank in range(num_ranks):
        group = Group()
        group.rank, group.size = rank, num_ranks
        worker = Worker(config, Ranks(group))
        yield worker
        worker.close()


def start(path: str, num_ranks: int, **options: object) -> None:
    for _ in workers(path, num_ranks, **options):
        pass


def check_sizes(path: str, num_ranks: int, expected: str, **options: object) -> None:
    """Those that an error names, and no others, can be had."""
    with pytest.raises(UnsupportedModelError, match=rf"would cut packed weights \(.*\): {expected} would do") as caught:
        start(path, num_ranks, **options)
    named = set(map(int, re.findall(r"\d+", str(caught.value).rpartition("):")[2])))
    for size in range(1, 5):
        if size in named:
            start(path, size, **options)
        else:
            with pytest.raises(UnsupportedModelError):
                start(path, size, **options)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sizes_that_would_do_are_those_of_the_whole_model(num_ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "quantization_config": FORMS["awq"][0]}))
    check_sizes(str(tmp_path), num_ranks, "1", load_format="dummy")


def test_parts_are_larger_blocks_if_smaller_ones_would_cut_weights(tmp_path):
    """Halves of 576 columns would be equal, but hold half a group of 128."""
    sizes = {**SIZES, "intermediate_size": 9 * 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "quantization_config": FORMS["awq"][0]}))
    widths = [
        worker.model.model.layers[0].mlp.down_proj.in_features
        for worker in workers(str(tmp_path), 2, load_format="dummy")
    ]
    assert widths == [512, 640]
    check_sizes(str(tmp_path), 3, "1 or 2", load_format="dummy")


def test_sizes_hold_for_all_tensors_of_a_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q8_0")
    check_sizes(str(path), 3, "1 or 2")


def test_a_model_whose_blocks_would_be_cut_says_so_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = {"load_format": "dummy", "quantization": "mxfp4", "skip_tokenizer_init": True, "device": "cpu"}
    with pytest.raises(UnsupportedModelError, match=r"would cut packed weights .*: 1 or \d+ would do"):
        LLM(str(tmp_path), tensor_parallel_size=2, **options)
