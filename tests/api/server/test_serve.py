"""`quire serve`: how it starts, stops, fails and reads its options, as a process."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from quire.api.server.run import listen
from quire.errors import ConfigError
from tests.serving import ServerProcess, alive, until

CERTIFICATE = Path(__file__).with_name("localhost.pem")  # for tests: certificate and key, of this machine, by nobody
LONG = {"prompt": [1, 2, 3, 4], "max_tokens": 2000, "ignore_eos": True, "stream": True}


def serve(*flags: str, timeout_s: float = 60) -> subprocess.CompletedProcess:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "quire", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, server: ServerProcess, body: dict) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.body = body
        self.events: list[dict | str] = []
        self.broken = False
        self.start()
        until(lambda: len(self.events) > 2, what="a stream's first tokens")

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.server.url + "/v1/completions", json=self.body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        data = line.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))
        except httpx.HTTPError:
            self.broken = True

    def finish_reason(self) -> str | None:
        return self.events[-2]["choices"][0]["finish_reason"]


# -- starting ----------------------------------------------------------------------------------------------------------


def test_it_is_alive_while_it_loads_and_ready_when_it_says_so(smollm2):
    with ServerProcess("--executor", "echo", wait=False) as server:
        seen = set()

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):  # not listening yet
                codes = tuple(server.get(path).status_code for path in ("/live", "/ready", "/health"))
                seen.add(codes)
                return codes == (200, 200, 200)
            return False

        until(ready, 60, "readiness")
        assert (200, 503, 503) in seen
        assert server.wait_ready().startswith(f"Quire is serving smollm2 on {server.url} (")
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["no-such-model-anywhere"], 3, "no-such-model-anywhere"),
        (["--executor", "nothing"], 2, "nothing"),
        (["--executor", "echo:fast"], 2, "echo:50"),  # known only to the engine, in its own process
        (["--api-key-file", "no-such-file"], 2, "no-such-file"),
        (["--ssl-certfile", "no-such-file"], 2, "--ssl-certfile"),
        (["--ssl-certfile", "README.md"], 2, "--ssl-certfile"),
        (["--config", "no-such-file"], 2, "no-such-file"),
        (["--port", "99999"], 2, "65535"),
        (["--api-key", "two words"], 2, "a key must"),
        (["--host", "192.0.2.1"], 2, "192.0.2.1"),
        (["--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line_and_an_exit_code(smollm2, flags, code, words):
    done = serve(*flags, *(["--port", "0"] if "--port" not in flags else []))
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("quire: ") and words in last and "Traceback" not in done.stderr


def test_a_port_in_use_is_told_at_once():
    with listen("127.0.0.1", 0) as taken:
        started = time.monotonic()
        done = serve("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and "--port" in done.stderr and done.stderr.count("\n") == 1
    assert time.monotonic() - started < 20


def test_other_addresses_can_be_listened_on():
    with listen("::1", 0) as sock:
        assert sock.getsockname()[0] == "::1"
    with listen("localhost", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError):
        listen("192.0.2.1", 0)


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new(smollm2, number):
    with ServerProcess("--executor", "echo:40") as server:
        reader = Reader(server, {**LONG, "max_tokens": 80})
        server.signal(number)
        until(lambda: server.get("/ready").status_code == 503, what="not being ready")
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert server.get("/live").status_code == 200
        cores = server.children()
        assert cores and server.process.wait(20) == 0
        reader.join(5)
        assert not reader.broken and reader.events[-1] == "[DONE]" and reader.finish_reason() == "length"
        assert not any(alive(pid) for pid in cores)
        assert list(server.folder.iterdir()) == []
        listen("127.0.0.1", server.port).close()


def test_what_does_not_finish_in_time_is_ended(smollm2):
    with ServerProcess("--executor", "echo:40", "--shutdown-timeout", "0.3") as server:
        reader = Reader(server, LONG)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 5
        reader.join(5)
        assert reader.finish_reason() == "abort"


def test_a_second_signal_stops_at_once(smollm2):
    with ServerProcess("--executor", "echo:40") as server:
        reader = Reader(server, LONG)
        cores = server.children()
        server.signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503, what="not being ready")
        started = time.monotonic()
        assert server.stop() == 128 + signal.SIGTERM
        assert time.monotonic() - started < 3
        assert cores and not any(alive(pid) for pid in cores)
        reader.join(5)
        assert "error" in reader.events[-2] and reader.events[-1] == "[DONE]"


def test_told_to_stop_while_loading_it_leaves(smollm2):
    with ServerProcess("--executor", "echo", wait=False) as server:

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return server.get("/live").status_code == 200
            return False

        until(answers, 60, "an open port")
        cores = server.children()
        assert server.stop(10) == 0
        assert not any(alive(pid) for pid in cores)


def test_killed_it_takes_its_engine_with_it(smollm2):
    with ServerProcess("--executor", "echo") as server:
        cores = server.children()
        server.process.kill()
        server.process.wait()
        until(lambda: not any(alive(pid) for pid in cores), what="the engine's end")


def test_an_engine_that_keeps_dying_ends_the_server_with_an_error(smollm2):
    with ServerProcess("--executor", "echo:20") as server:
        killed = set()
        deadline = time.monotonic() + 60
        while server.process.poll() is None and time.monotonic() < deadline:
            for pid in set(server.children()) - killed:  # the engine at work and the one that stands by
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        assert server.process.wait(10) == 5
        assert len(killed) >= 8
        assert "quire: the engine died 8 times in a row" in server.log()


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_come_from_a_file_and_what_is_typed_wins(smollm2, tmp_path):
    file = tmp_path / "options.yaml"
    options = [
        "model: no-such-model",
        "executor: echo",
        "served-model-name: [one, two]",
        "max_model_len: 333",
        "port: 1",
        "api-key: k1",
        "log-format: json",
    ]
    file.write_text("\n".join(options) + "\n")
    with ServerProcess("smollm2", "--config", str(file), "--max-model-len", "222", wait=False) as server:

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return server.get("/ready").status_code == 200
            return False

        until(ready, 60, "readiness")
        key = {"authorization": "Bearer k1", "x-request-id": "r1"}
        assert server.get("/v1/models").status_code == 401
        models = server.get("/v1/models", headers=key).json()["data"]
        assert [model["id"] for model in models] == ["one", "two"] and models[0]["max_model_len"] == 222
        secret = server.post("/v1/completions", {"prompt": "sesame", "max_tokens": 1}, headers=key)
        assert secret.status_code == 200
        assert server.stop() == 0
        entries = [json.loads(line) for line in server.log().splitlines()]
        assert any("Quire is serving one, two" in entry["message"] for entry in entries)
        calls = [entry for entry in entries if entry.get("request_id") == "r1"]
        logged = [(call["method"], call["path"], call["status"]) for call in calls]
        assert logged == [("GET", "/v1/models", 200), ("POST", "/v1/completions", 200)]
        assert "sesame" not in server.log() and "k1" not in server.log()


def test_every_process_writes_lines_of_json(served_llama):
    with ServerProcess(
        *served_llama, "-tp", "2", *"--device cpu --log-format json --log-level info".split(), wait=False
    ) as server:
        until(lambda: "Quire is serving" in server.log(), 60, "readiness")
        assert server.stop() == 0
        entries = [json.loads(line) for line in server.log().splitlines()]
    assert {entry.get("process") for entry in entries} >= {"core", "worker 0", "worker 1"}


def test_with_a_certificate_it_speaks_https(smollm2):
    with ServerProcess("--executor", "echo", "--ssl-certfile", str(CERTIFICATE), wait=False) as server:
        assert f"https://127.0.0.1:{server.port}" in server.wait_ready()
        trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
        assert httpx.get(f"https://localhost:{server.port}/ready", verify=trusted).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url + "/ready")


def test_a_port_of_zero_takes_a_free_one(smollm2):
    with ServerProcess("--port", "0", "--executor", "echo", wait=False) as server:
        url = server.wait_ready().split()[5]
        assert not url.endswith(":0") and httpx.get(url + "/live").status_code == 200
