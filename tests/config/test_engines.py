"""Several engines: what may be asked for, and what each of them gets of the machine."""

import pytest

from quire import env
from quire.config import EngineConfig
from quire.config.resolve import Machine, resolve
from quire.errors import ConfigError
from tests.config.test_flags import HF, parse


def test_the_short_flags_are_vllms():
    parallel = parse("-dp", "2", "-dpb", "mp", "-tp", "2").parallel
    assert parallel.data_parallel_size == parallel.num_engines == 2 and parallel.num_workers == 2


@pytest.mark.parametrize(
    "options, words",
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        ({"data_parallel_size": 2000}, "data_parallel_size must be at most 1024"),
        ({"data_parallel_backend": "grpc"}, "data_parallel_backend must be one of mp, ray"),
        ({"data_parallel_rank": 0, "data_parallel_size": 2, "data_parallel_index": 1}, "data_parallel_index must be"),
        ({"data_parallel_rank": 1}, r"must be below data_parallel_size \(1\), not 1"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, r"below data_parallel_size \(2\), not 2"),
        ({"data_parallel_size": 2, "data_parallel_rank": -1}, "at least 0"),
        ({"data_parallel_size": 2, "data_parallel_index": 2}, "below the number of engines"),
    ],
)
def test_numbers_of_engines_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_kwargs(**options)


def test_a_server_with_a_rank_has_one_engine():
    parallel = EngineConfig.from_kwargs(data_parallel_size=4, data_parallel_rank=2).parallel
    assert parallel.num_engines == 1 and parallel.first_device == 0


def test_engines_have_the_gpus_one_after_the_other():
    config = EngineConfig.from_kwargs(data_parallel_size=3, tensor_parallel_size=2)
    firsts = [config.replace(data_parallel_index=idx).parallel.first_device for idx in range(3)]
    assert firsts == [0, 2, 4]
    elsewhere = config.replace(data_parallel_index=1, distributed_executor_backend="some.module").parallel
    assert elsewhere.first_device == 0 and elsewhere.first_worker == 2


@pytest.mark.parametrize(
    "options, words",
    [
        ({"data_parallel_size": 2}, "2 engines with 1 GPUs each need 2, and there are 1: lower --data-parallel-size"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "2 engines with 2 GPUs each need 4, and there are 1"),
        ({"tensor_parallel_size": 2}, "2 workers need a GPU each, and there are 1"),
    ],
)
def test_more_engines_than_gpus_are_refused_with_the_numbers(options, words):
    with pytest.raises(ConfigError, match=words):
        resolve(EngineConfig.from_kwargs(**options), "/m", "hf", HF, Machine(num_cores=8, num_gpus=1))
    with_rank = EngineConfig.from_kwargs(data_parallel_size=2, data_parallel_rank=1)
    resolve(with_rank, "/m", "hf", HF, Machine(num_cores=8, num_gpus=1))


def test_threads_are_divided_among_the_workers_of_all_engines():
    config = EngineConfig.from_kwargs(data_parallel_size=2, tensor_parallel_size=2)
    machine = Machine(num_cores=17)
    assert resolve(config, "/m", "hf", HF, machine, serving=True).device.num_threads == 4
    assert resolve(config, "/m", "hf", HF, Machine(num_cores=2), serving=True).device.num_threads == 1


def test_threads_that_the_environment_names_are_each_processs(monkeypatch):
    config = EngineConfig.from_kwargs(tensor_parallel_size=2)
    for value, expected in (("3", 3), ("5,2", 5), ("", 8), ("many", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        machine = Machine(num_cores=16, num_threads=env.num_threads())
        assert resolve(config, "/m", "hf", HF, machine).device.num_threads == expected
    chosen = EngineConfig.from_kwargs(num_threads=7)
    assert resolve(chosen, "/m", "hf", HF, Machine(num_cores=16, num_threads=3)).device.num_threads == 7
