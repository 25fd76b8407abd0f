"""Keys: where they come from, what a key file may hold, and that a changed file never opens the server."""

import asyncio
import logging
import os
import re
import time

import httpx
import pytest
from benchmarks.server_process import free_port

from quire import env
from quire.api import cli
from quire.api.server.errors import Refused
from quire.api.server.keys import Keys, with_environment
from quire.config.server import ServerConfig
from quire.errors import ConfigError, RateLimitedError
from tests.serving import ServerProcess, until


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("VLLM_")] + ["QUIRE_API_KEY", "QUIRE_LOG_LEVEL"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="quire.server")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "quire.server"]


def opens(keys: Keys, key: str) -> bool:
    try:
        keys.check("user", {b"authorization": b"Bearer " + key.encode()})
    except Refused as refused:
        assert refused.problem.status == 401
        return False
    return True


def from_file(path, content: str) -> Keys:
    path.write_text(content)
    return Keys(ServerConfig(api_key_file=str(path)))


def refresh(keys: Keys) -> None:
    asyncio.run(keys.refresh())


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "name", "key"),
    [
        ({"VLLM_API_KEY": "sesame"}, "VLLM_API_KEY", "sesame"),
        ({"VLLM_API_KEY": "open", "QUIRE_API_KEY": "sesame"}, "QUIRE_API_KEY", "sesame"),
        ({"VLLM_API_KEY": "sesame", "QUIRE_API_KEY": ""}, "VLLM_API_KEY", "sesame"),
    ],
)
def test_a_variable_locks_the_server_and_is_named(monkeypatch, lines, variables, name, key):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    keys = Keys(with_environment(ServerConfig()))
    assert opens(keys, key) and not opens(keys, "open")
    assert lines() == [f"clients need the key that is in {name}"]


def test_flags_come_before_the_variable(monkeypatch, lines, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    (tmp_path / "keys").write_text("k1\n")
    for config in (ServerConfig(api_key=["k1"]), ServerConfig(api_key_file=str(tmp_path / "keys"))):
        keys = Keys(with_environment(config))
        assert opens(keys, "k1") and not opens(keys, "sesame")
    assert lines() == []


def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame open")
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as error:
        with_environment(ServerConfig())
    assert "sesame" not in str(error.value)


def test_other_variables_of_vllm_are_listed_once(monkeypatch, lines):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")
    assert with_environment(ServerConfig()) == ServerConfig()
    assert lines() == ["these variables have no effect here: VLLM_ATTENTION_BACKEND, VLLM_USE_V1"]


def test_a_bad_log_level_is_one_sentence(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "trace")
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        env.log_level()
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "Info")
    assert env.log_level() == "INFO"
    monkeypatch.delenv("QUIRE_LOG_LEVEL")
    assert (env.log_level(), env.log_level("info")) == ("WARNING", "INFO")


# -- the key file ------------------------------------------------------------------------------------------------------


def test_a_line_is_a_key_with_a_label_and_limits(tmp_path):
    keys = from_file(tmp_path / "keys", "# whose\n\n k1 label=web rpm=2 tpm=100 \r\nk2\ttpm=7\nk=3\n")
    web, batch, plain = (keys.check("user", {b"authorization": b"Bearer " + key}) for key in (b"k1", b"k2", b"k=3"))
    assert (web.label, web.limits.rpm, web.limits.tpm) == ("web", 2, 100)
    assert (batch.label, batch.limits.rpm, batch.limits.tpm) == ("", None, 7)
    assert (plain.label, plain.limits) == ("", None)
    assert len({web.owner, batch.owner, plain.owner}) == 3 and "k1" not in web.owner


BAD_LINES = {
    "unknown setting": "k1 quota=7\n",
    "another key": "k1 sesame\n",
    "no number": "k1 rpm=many\n",
    "zero": "k1 rpm=0\n",
    "negative": "k1 tpm=-5\n",
    "huge": "k1 tpm=10000000000000\n",
    "other digits": "k1 tpm=٣\n",
    "empty label": "k1 label=\n",
    "twice": "k1 rpm=1 rpm=2\n",
    "label that forges": "k1 label=a;b\n",
    "no key": "label=ü rpm=3\n",
    "same key twice": "k1\nk1 rpm=3\n",
    "not ASCII": "kü\n",
}
BAD_FILES = {**BAD_LINES, "empty": "", "remarks only": "# none\n", "no end": "sesame"}


@pytest.mark.parametrize("content", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_keeps_the_server_from_starting(tmp_path, content):
    with pytest.raises(ConfigError, match="line [12] of the key file") as error:
        from_file(tmp_path / "keys", content)
    assert "sesame" not in str(error.value)


def test_at_the_start_the_last_line_may_end_with_the_file(tmp_path):
    assert opens(from_file(tmp_path / "keys", "k1\nk2"), "k2")


def test_a_changed_file_is_read_again(tmp_path, lines):
    keys = from_file(tmp_path / "keys", "k1\nk2\n")
    (tmp_path / "keys").write_text("k2\nk3\n")
    refresh(keys)
    assert [opens(keys, key) for key in ("k1", "k2", "k3")] == [False, True, True]
    refresh(keys)
    assert lines() == ["the key file was read again: 2 keys"]


def test_a_file_of_the_same_size_and_time_is_read_again_while_it_is_new(tmp_path):
    file = tmp_path / "keys"
    keys = from_file(file, "k1\n")
    refresh(keys)
    before = os.stat(file)
    with file.open("r+") as same:
        same.write("k2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    refresh(keys)
    assert opens(keys, "k2") and not opens(keys, "k1")


def test_a_file_that_does_not_change_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    keys = from_file(file, "k1\n")
    os.utime(file, (time.time() - 60, time.time() - 60))
    refresh(keys)
    read = []
    monkeypatch.setattr("quire.api.server.watched.read_file", lambda *_: read.append(1))
    refresh(keys)
    assert read == []


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_went_bad_changes_nothing_and_is_told_once(tmp_path, lines, content):
    keys = from_file(tmp_path / "keys", "k1 label=web\n")
    (tmp_path / "keys").write_text(content)
    for _ in range(3):
        refresh(keys)
        assert opens(keys, "k1") and not opens(keys, "sesame") and not opens(keys, "")
    (line,) = lines()
    assert "the keys are those from before" in line and "sesame" not in line
    (tmp_path / "keys").write_text("k9\n")
    refresh(keys)
    assert opens(keys, "k9") and not opens(keys, "k1")


def test_a_missing_file_changes_nothing_and_may_come_back(tmp_path, lines):
    keys = from_file(tmp_path / "keys", "k1\n")
    (tmp_path / "keys").unlink()
    for _ in range(3):
        refresh(keys)
        assert opens(keys, "k1") and not opens(keys, "k2")
    assert len(lines()) == 1
    (tmp_path / "new").write_text("k2\n")
    (tmp_path / "new").rename(tmp_path / "keys")
    refresh(keys)
    assert opens(keys, "k2") and not opens(keys, "k1")


def test_what_a_key_used_stays_counted_when_the_file_changes(tmp_path):
    keys = from_file(tmp_path / "keys", "k1 rpm=2\n")

    def call() -> None:
        keys.check("user", {b"authorization": b"Bearer k1"}).limits.start_call()

    call()
    (tmp_path / "keys").write_text("k1 rpm=3\nk2\n")
    refresh(keys)
    call()
    call()
    with pytest.raises(RateLimitedError, match="3 requests a minute"):
        call()


def test_an_operators_key_opens_users_paths_also_after_a_change(tmp_path):
    (tmp_path / "keys").write_text("k1\n")
    keys = Keys(ServerConfig(api_key_file=str(tmp_path / "keys"), admin_api_key="root"))
    (tmp_path / "keys").write_text("k2\n")
    refresh(keys)
    assert opens(keys, "root") and opens(keys, "k2")
    assert keys.check("admin", {b"authorization": b"Bearer root"}).owner


# -- a real server -----------------------------------------------------------------------------------------------------


def test_a_server_counts_tokens_tells_who_called_and_serves_metrics_apart(smollm2, tmp_path):
    file, metrics_port = tmp_path / "keys", free_port()
    file.write_text("sesame1 label=web tpm=50\n")
    flags = ["--executor", "echo", "--api-key-file", str(file), "--metrics-port", str(metrics_port)]
    flags += ["--metrics-prefix", "vllm:", "--served-model-name", "chat-1", "--root-path", "/llm"]
    with ServerProcess(*flags) as server:

        def ask(num_tokens: int, key: str = "sesame1", **fields) -> httpx.Response:
            body = {"prompt": [1, 2, 3], "max_tokens": num_tokens, "ignore_eos": True, **fields}
            return server.post("/llm/v1/completions", body, headers={"authorization": f"Bearer {key}"})

        assert [ask(10).status_code for _ in range(3)] == [200] * 3  # 13 tokens each
        refused = ask(9)
        assert refused.status_code == 429 and 50 <= int(refused.headers["retry-after"]) <= 60
        assert "11 are left and this may take 12" in refused.json()["error"]["message"]
        assert ask(4, n=2).status_code == 200  # 3 + 2 × 4: to the token
        assert ask(1, prompt="a text").status_code == 429
        assert ask(1, "sesame2").status_code == 401
        with file.open("a") as more:
            more.write("sesame2 rpm=1000\n")
        until(lambda: ask(1, "sesame2").status_code == 200, 5, "the new key")
        assert ask(1, "sesame2", prompt="a text").status_code == 200  # no tokens are counted for this one

        assert server.get("/metrics").status_code == 401
        url = f"http://127.0.0.1:{metrics_port}"
        text = httpx.get(url + "/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="chat-1"} 0.0' in text and "quire:" not in text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 6.0' in text
        assert re.search(r'vllm:cache_config_info\{.*num_gpu_blocks="[1-9]', text)
        assert httpx.get(url + "/v1/models").status_code == 404
        assert server.stop() == 0
        log = server.log()
        assert "from 127.0.0.1 as web: rate_limit_exceeded: this key may use 50 tokens a minute" in log
        assert "the key file was read again: 2 keys" in log and "sesame" not in log


def test_a_server_is_locked_by_vllms_variable_and_logs_what_it_is_told_to(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    path = tmp_path / "s"
    with ServerProcess("--executor", "echo", "--uds", str(path), "--log-level", "debug", wait=False) as server:
        assert f"on unix:{path} (" in server.wait_ready()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert server.stop() == 0 and not path.exists()
        log = server.log()
        assert "the key that is in VLLM_API_KEY" in log and "no effect here: VLLM_USE_V1" in log
        assert "sesame" not in log and " core " in log  # the engine's lines, too


def test_a_bad_log_level_keeps_commands_from_running(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "trace")
    assert cli.run(["models"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: QUIRE_LOG_LEVEL") and error.count("\n") == 1
