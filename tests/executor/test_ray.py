"""Workers on the machines of a Ray cluster give what one process gives, and the server outlives machines.

Machines are network namespaces with addresses of their own (`machines.py`); where these are not allowed, the tests that
need them say so, and one machine is what the others use.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams, env
from quire.errors import ClusterError, EngineError, WorkerDied
from quire.executor._cluster import _folder, _read_environment
from tests.executor.machines import ROOT, Machine, Machines, environment, why_not
from tests.executor.test_multiproc import is_gone, listening_inodes, until
from tests.serving import ServerProcess

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 400,
    "num_threads": 1,
    "distributed_executor_backend": "ray",
}
LAYOUTS = {"tp 2": {"tensor_parallel_size": 2}, "pp 2": {"pipeline_parallel_size": 2}}
PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [3], [7, 8, 9] * 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm2) -> dict:
    from quire.models.llama import TINY

    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(TINY | {"vocab_size": 49152, "max_position_embeddings": 2048}))
    return {"model": str(folder), "tokenizer": str(smollm2), "load_format": "dummy", **OPTIONS}


@pytest.fixture(scope="module")
def expected(model) -> list:
    with LLM(**{**model, "distributed_executor_backend": "inproc"}) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


# -- in a program that uses Ray itself ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_cluster():
    """One that asks nobody for a token. Its address."""
    before = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE")}
    env.restore({"RAY_AUTH_MODE": "disabled"})
    _read_environment()
    ray.init(address="local", num_cpus=3, num_gpus=0, include_dashboard=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    env.restore(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_that_uses_ray_goes_on_using_it(own_cluster, layout, model, expected):
    with LLM(**model, **LAYOUTS[layout], pipeline_depth=2) as llm:
        assert answers(llm) == expected
        llm.client.engine.kv.check()
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == expected
    assert ray.is_initialized()
    until(lambda: ray.available_resources().get("CPU") == 3)


def test_a_worker_that_dies_is_an_error_that_names_it(own_cluster, model):
    with LLM(**model, **LAYOUTS["tp 2"]) as llm:
        executor = llm.client.engine.executor
        executor.check()
        ray.kill(executor.actors[1])
        with pytest.raises(WorkerDied, match=r"worker 1 on the machine \S+ died"):
            until(executor.check)
        with pytest.raises(EngineError, match="cannot go on"):
            answers(llm)


def test_too_few_devices_are_counted(own_cluster, model):
    with pytest.raises(
        ClusterError, match=r"4 workers need a CPU each, and the Ray cluster has 3, of which 3 are free \("
    ):
        LLM(**model, tensor_parallel_size=2, pipeline_parallel_size=2)


def test_other_versions_are_named(own_cluster, model, monkeypatch):
    monkeypatch.setattr("quire.executor.ray.versions", lambda: {"Quire": "9.9"})
    with pytest.raises(ClusterError, match=r"the machine \S+ has Quire .* instead of 9\.9: install the same"):
        LLM(**model, **LAYOUTS["tp 2"])


def test_a_cluster_without_tokens_is_warned_of_and_used(own_cluster, model, expected):
    variables = {**environment(None), "RAY_ADDRESS": own_cluster}
    with run_program(json.dumps(model | LAYOUTS["tp 2"]), env=variables) as process:
        assert said(process) == expected
        go_on(process)
        process.wait(60)
        assert "this Ray cluster asks nobody for a token" in process.stderr.read()


# -- without a cluster -------------------------------------------------------------------------------------------------


def run_program(*arguments: str, through: list[str] = [], env: dict[str, str] | None = None) -> subprocess.Popen:
    """`program` of this module in a process of its own."""
    command = [*through, sys.executable, "-c", "from tests.executor.test_ray import program; program()", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, cwd=ROOT, env=env or environment("unused"))


def program() -> None:
    """Answers with each of some options, and waits for a line after each; what goes wrong is said in a line."""
    for options in map(json.loads, sys.argv[1:]):
        try:
            with LLM(**options) as llm:
                print(json.dumps(answers(llm)), flush=True)
                sys.stdin.readline()
        except ClusterError as error:
            print(json.dumps(str(error)), flush=True)
            sys.stdin.readline()


def said(process: subprocess.Popen) -> object:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def go_on(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def ray_processes(names: tuple[str, ...] = ("raylet", "gcs_server", "ray::RankActor")) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            program = words.split(" ", 1)[0].rpartition("/")[2]
            if program.startswith(names):
                found[int(entry.name)] = words
    return found


def wildcards(pid: int) -> int:
    """How many sockets of the process listen on all interfaces."""
    inodes, found = listening_inodes(pid), 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found += set(fields[1].partition(":")[0]) == {"0"}
    return found


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_cluster_of_its_own_is_closed_to_others_and_ends_with_it(model, expected, end):
    before = set(ray_processes())
    folders = set(Path("/tmp").glob("quire-ray-*"))
    with run_program(json.dumps(model | LAYOUTS["tp 2"]), env=environment(None)) as process:
        assert said(process) == expected
        started = {pid: words for pid, words in ray_processes().items() if pid not in before}
        assert sum("RankActor" in words for words in started.values()) == 2
        assert [wildcards(pid) for pid in started] == [0] * len(started)
        (gcs,) = (pid for pid, words in started.items() if "gcs_server" in words)
        told = Path(f"/proc/{gcs}/environ").read_bytes().split(b"\0")
        assert b"RAY_AUTH_MODE=token" in told and len({word for word in told if b"RAY_AUTH_TOKEN=" in word}) == 1
        if end == "closed":
            go_on(process)
        else:
            process.kill()
        process.wait(60)
    until(lambda: all(map(is_gone, started)))
    left = set(Path("/tmp").glob("quire-ray-*")) - folders
    assert len(left) == (0 if end == "closed" else 1)
    shutil.rmtree(_folder())  # which the next one begins with
    assert not any(path.exists() for path in left)


NO_CLUSTERS = {
    "127.0.0.1:1": "no Ray cluster answers at 127.0.0.1:1 (Connection refused): start one there",
    "nowhere.invalid:6379": "no Ray cluster answers at nowhere.invalid:6379",
    "ray://127.0.0.1:10001": "is not host:port",
    "somewhere": "is not host:port",
}


def test_an_address_without_a_cluster_is_said_at_once(model):
    with run_program(*(json.dumps(model | {"ray_address": address}) for address in NO_CLUSTERS)) as process:
        for sentence in NO_CLUSTERS.values():
            assert sentence in str(said(process))
            go_on(process)


def test_without_ray_the_extra_is_named(monkeypatch, model):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"Ray is not installed: pip install 'quire\[ray\]'"):
        LLM(**model)


# -- on several machines -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machines():
    if reason := why_not():
        pytest.skip(f"one machine is all there is: {reason}")
    with Machines() as machines:
        for _ in range(3):
            machines.add()
        yield machines


def run_on(machines: Machines, *options: dict, env: dict[str, str] | None = None) -> subprocess.Popen:
    """A program on the first machine, with some options each."""
    given = [json.dumps({**each, "ray_address": machines.address}) for each in options]
    return run_program(*given, through=machines.all[0].through, env=env or machines.environment())


def test_workers_on_two_machines_say_what_one_process_says(machines, model, expected):
    with run_on(machines, *(model | layout for layout in LAYOUTS.values())) as process:
        for _ in LAYOUTS:
            assert said(process) == expected
            actors = [pid for pid, words in ray_processes(("ray::RankActor",)).items()]
            assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in actors}) == 2
            # Ray's own socket is on all interfaces, ours are not.
            assert all(wildcards(pid) <= 1 for pid in actors)
            go_on(process)


def test_a_wrong_token_is_refused_and_none_too(machines, model):
    for variables in (environment("0" * 32), environment(None)):
        with run_on(machines, model, env=variables) as process:
            go_on(process)
            assert "refused our token: set RAY_AUTH_MODE=token" in said(process)


def test_more_devices_than_all_machines_have(machines, model):
    with run_on(machines, model | {"tensor_parallel_size": 4}) as process:
        go_on(process)
        addresses = ", ".join(f"1 at {machine.address}" for machine in machines.all)
        assert f"the Ray cluster has 3, of which 3 are free ({addresses})" in said(process)


class Streams:
    """Sixteen answers at once, each a stream."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.num_tokens = [0] * 16

    async def all(self, num_tokens: int) -> list[str]:
        async with httpx.AsyncClient(base_url=self.url, timeout=180) as client:
            return await asyncio.gather(*(self._one(client, idx, num_tokens) for idx in range(16)))

    async def all_after(self, num_seen: int, happens: Callable[[], None]) -> list[str]:
        """200 tokens of each; when all have begun and none has ended, something happens."""
        self.num_tokens = [0] * 16
        running = asyncio.create_task(self.all(200))
        while min(self.num_tokens) < num_seen:
            await asyncio.sleep(0.01)
        assert max(self.num_tokens) < 200
        happens()
        return await running

    async def _one(self, client: httpx.AsyncClient, idx: int, num_tokens: int) -> str:
        body = {
            "model": self.model, "prompt": [idx + 3, 7, 9], "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    self.num_tokens[idx] += 1
        return text


BODY = {"model": "m", "prompt": [3, 7, 9], "max_tokens": 4, "temperature": 0}
NOT_THERE = "the machines that compute this model are not all there"


def serving(machines: Machines, machine: Machine, model: dict, *layout: str) -> ServerProcess:
    """A server on this machine, with workers on any."""
    flags = [text for name, value in model.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--ray-address", machines.address, *layout, "--served-model-name", "m"]
    return ServerProcess(*flags, host=machine.address, through=machine.through, environment=machines.environment())


def busy_machine(machines: Machines) -> Machine:
    """One that has a worker and is not the first."""
    actors = set(ray_processes(("ray::RankActor",)))
    return next(machine for machine in machines.all[1:] if actors & set(machine.pids()))


def restarts(server: ServerProcess) -> list[float]:
    """Of each of two engines."""
    found = [0.0, 0.0]
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("quire:engine_restarts_total{"):
            found['engine="1"' in line] += float(line.rpartition(" ")[2])
    return found


def test_of_two_engines_the_one_restarts_whose_worker_died(machines, model):
    without = {name: value for name, value in model.items() if name != "distributed_executor_backend"}
    flags = "-dp", "2", "--data-parallel-backend", "ray"
    with serving(machines, machines.all[0], without, *flags) as server:
        streams = Streams(server.url, "m")
        whole = asyncio.run(streams.all(200))
        workers = ray_processes(("ray::RankActor",))
        assert len(workers) == 2
        assert asyncio.run(streams.all_after(5, lambda: os.kill(min(workers), signal.SIGKILL))) == whole, server.log()
        assert sorted(restarts(server)) == [0, 1]
        left = ray_processes(("ray::RankActor",))
        assert len(left) == 2 and max(workers) in left
        assert server.stop() == 0


def test_a_server_outlives_its_machines(machines, model):
    """First there are enough left, then not; then one comes back."""
    with serving(machines, machines.all[0], model, "-tp", "2") as server:
        streams = Streams(server.url, "m")
        whole = asyncio.run(streams.all(200))
        assert asyncio.run(streams.all_after(5, lambda: busy_machine(machines).lose())) == whole, server.log()
        assert server.get("/health").status_code == 200

        busy_machine(machines).lose()
        lost_at = time.monotonic()
        answer = server.post("/v1/completions", BODY)
        assert time.monotonic() - lost_at < 30
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["message"].startswith(NOT_THERE)
        assert server.get("/health").status_code == 503

        machines.add()
        until(lambda: server.post("/v1/completions", BODY).status_code == 200, 60)
        assert asyncio.run(streams.all(200)) == whole
        assert server.stop() == 0


def test_a_link_that_goes_down_is_a_lost_machine(machines, model):
    """Nobody is told: nothing comes any more."""
    with serving(machines, machines.all[0], model, "-tp", "2") as server:
        assert server.post("/v1/completions", BODY).status_code == 200
        busy_machine(machines).unplug()
        since = time.monotonic()
        answer = server.post("/v1/completions", BODY)
        assert time.monotonic() - since < 90
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["message"].startswith(NOT_THERE)
        machines.add()
        until(lambda: server.post("/v1/completions", BODY).status_code == 200, 90)


def test_a_machine_without_the_model_is_named(machines, model, tmp_path):
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_bytes(Path(model["model"], "config.json").read_bytes())
    last = machines.add(num_cpus=4, without=other)
    with run_on(machines, model | {"model": str(other), "tensor_parallel_size": 4}) as process:
        go_on(process)
        assert f"the machine {last.address} has no model under {other}: copy the model" in str(said(process))


def test_the_head_lost_is_said_too(machines, model):
    """By a server on another machine, whose workers are there, too: it lives until Ray gives up."""
    other = machines.all[-1]
    with serving(machines, other, model, "-tp", "2") as server:
        assert server.post("/v1/completions", BODY).status_code == 200
        machines.all[0].lose()
        until(lambda: server.post("/v1/completions", BODY).status_code == 503, 60)
        assert server.post("/v1/completions", BODY).json()["error"]["message"].startswith(NOT_THERE)
