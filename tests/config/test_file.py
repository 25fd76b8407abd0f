"""Options from a YAML file."""

from pathlib import Path

import pytest

from quire.config import EngineConfig, ServingConfig
from quire.config.file import read_options
from quire.config.server import ServerConfig
from quire.errors import ConfigError

OPTIONS = (EngineConfig, ServingConfig, ServerConfig)


def read(folder: Path, text: str) -> dict:
    path = folder / "options.yaml"
    path.write_text(text)
    return read_options(str(path), OPTIONS)


def test_options_are_read_by_the_names_of_their_flags(tmp_path):
    lines = [
        "model: smollm2",
        "max-model-len: 4096",
        "max_num_seqs: 8",
        "kv-cache-memory-bytes: 1.5G",
        "port: 9",
        "watchdog-s: 5",
        "log-requests: true",
    ]
    text = "\n".join(lines) + "\n"
    values = read(tmp_path, text)
    assert values.pop("port") == 9 and values.pop("log_requests") is True and values.pop("watchdog_s") == 5
    assert EngineConfig.from_kwargs(**values) == EngineConfig.from_kwargs(
        model="smollm2", max_model_len=4096, max_num_seqs=8, kv_cache_memory_bytes=3 << 29
    )


def test_a_list_can_be_one_value(tmp_path):
    assert read(tmp_path, "api-key: a\nserved-model-name: [b, c]\n") == {
        "api_key": ["a"],
        "served_model_name": ["b", "c"],
    }


def test_an_empty_file_and_an_empty_value_change_nothing(tmp_path):
    assert read(tmp_path, "") == {} and read(tmp_path, "# nothing\nport:\n") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length: 3", "did you mean 'max-model-len'"),
        ("config: other.yaml", "unknown option 'config'"),
        ("- port\n- 3", "names and values"),
        ("port: [", "line"),
        ("port: !!python/object/apply:os.getcwd []", "no valid YAML"),
        ("port: " + "[" * 100_000, "no valid YAML"),
        ("port: 2020-99-99", "no valid YAML"),
        ("# " + "x" * (1 << 18), "larger than 256 KiB"),
        ("max-body-bytes: lots", "cannot be 'lots'"),
        ("max-num-seqs: many", "cannot be 'many'"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "twice"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_a_missing_file_is_told_so():
    with pytest.raises(ConfigError, match="cannot be read"):
        read_options("no-such-file.yaml", OPTIONS)
