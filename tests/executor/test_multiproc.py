"""A worker in a process of its own gives what one in the same process gives, and leaves nothing behind."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker

import pytest
from benchmarks.server_process import QUIRE, ServerProcess, children, family, listening_inodes, state

from quire import LLM, SamplingParams
from quire.config import ServingConfig
from quire.errors import BadModelFileError, CapacityError, EngineError, PoisonError, WorkerDied
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.supervisor import SPARE_DELAY_S
from quire.ops.packed_linear import cpu as linear
from quire.params import StructuredOutputs
from tests.long import long_but
from tests.poison import POISONS, RAISE

OPTIONS = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "device": "cpu"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["n", "b"]}
SHARED = list(range(20, 60))
PROMPTS = [[5, 6, 7, 8, 9], [*SHARED, 3], [3], [*SHARED, 4], [7, 8, 9] * 8, [*SHARED, 3]]


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm2) -> dict:
    """A random Llama of a few layers that knows the default model's tokens, as options of an engine."""
    from quire.models.llama import TINY

    folder = tmp_path_factory.mktemp("llama")
    config = TINY | {"vocab_size": 49152, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "tokenizer": str(smollm2), "load_format": "dummy", **OPTIONS}


def started(options: dict, executor: str = "mp") -> LLM:
    return LLM(**options, distributed_executor_backend=executor)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **fields)


def answers(llm: LLM, params=None, prompts=PROMPTS) -> list:
    found = llm.generate(prompts, params or greedy(), use_tqdm=False)
    return [(output.prompt_logprobs, [vars(choice) for choice in output.outputs]) for output in found]


def workers(llm: LLM) -> list[int]:
    return [process.pid for process in llm.client.engine.executor.processes]


class Left:
    """What there was before: nothing else is left afterwards."""

    def __enter__(self) -> "Left":
        resource_tracker.ensure_running()  # libraries start it when they like: a process and a descriptor
        self.before = self.now()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.now() == self.before

    @staticmethod
    def now() -> tuple[int, list[int]]:
        return len(os.listdir("/proc/self/fd")), children(os.getpid())


def until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return state(pid) in "ZX"


# -- the same tokens ---------------------------------------------------------------------------------------------------

PARAMS = {
    "greedy": greedy(),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True, n=2),
    "logprobs": greedy(logprobs=3, prompt_logprobs=2),
    "penalties": greedy(frequency_penalty=0.5, min_tokens=4, logit_bias={11: 2.0}),
    "schema": SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputs(json=SCHEMA)),
}
LAYOUTS = {
    "plain": {},
    "two steps in flight": {"pipeline_depth": 2},
    "guessing": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}},
    "preempting": {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("layout", long_but(LAYOUTS, "guessing"))
def test_answers_are_those_of_one_process(model, layout):
    options = {**model, **LAYOUTS[layout]}
    found: dict[str, list] = {}
    with Left():
        for executor in ("inproc", "mp"):
            with started(options, executor) as llm:
                found[executor] = [answers(llm, params) for params in PARAMS.values()]
                llm.client.engine.kv.check()
                stats = llm.client.engine.stats()
            assert stats.prefix_hits > 0
            assert bool(stats.num_preemptions) == (layout == "preempting")
            assert bool(stats.num_drafts) == (layout == "guessing")
    for name, inproc, multiproc in zip(PARAMS, found["inproc"], found["mp"], strict=True):
        assert inproc == multiproc, name


def test_every_stage_replays_its_steps(model):
    """What one of them computes with torch is computed call by call, and all wait for it."""
    with started({**model, "dtype": "bfloat16", "pipeline_parallel_size": 2}) as llm:
        assert llm.client.engine.executor.num_graphs == linear.supported()


def test_a_result_may_be_larger_than_the_ring(model):
    options, params = {**model, "max_logprobs": -1}, SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    with started(options, "inproc") as inproc, started(options) as multiproc:
        assert answers(inproc, params, PROMPTS[:3]) == answers(multiproc, params, PROMPTS[:3])


def test_it_sleeps_and_wakes_up(model):
    with Left(), started(model) as llm:
        expected = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm) == expected


def test_an_engine_outlives_the_thread_that_made_it(model):
    made = []
    with Left():
        thread = threading.Thread(target=lambda: made.append(started(model)))
        thread.start()
        thread.join()
        with made[0] as llm:
            assert len(answers(llm)) == len(PROMPTS)


def test_nobody_listens_at_a_port(model):
    before = listening_inodes(os.getpid())  # pytest itself may
    with started(model) as llm:
        answers(llm)
        (pid,) = workers(llm)
        assert listening_inodes(pid) == set() and listening_inodes(os.getpid()) == before


# -- failing -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_says_why(tiny_llama, tmp_path):
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: -64 if path.suffix == ".safetensors" else None])
    options = {"model": str(tmp_path), "skip_tokenizer_init": True, **OPTIONS}
    said = []
    with Left():
        for executor in ("inproc", "mp"):
            with pytest.raises(BadModelFileError) as caught:
                started(options, executor)
            said.append(str(caught.value))
    assert said[0] == said[1]


def test_what_does_not_fit_is_said_before_anything_is_left(model):
    with Left(), pytest.raises(CapacityError):
        started({**model, "num_gpu_blocks_override": 2})


@pytest.mark.parametrize("signum", long_but([signal.SIGKILL, signal.SIGSEGV], signal.SIGKILL))
def test_a_worker_that_dies_is_an_error_with_its_signal(model, signum):
    with Left(), started(model) as llm:
        answers(llm)
        os.kill(workers(llm)[0], signum)
        with pytest.raises(WorkerDied, match=f"worker 0 was killed by {signum.name}") as caught:
            answers(llm)
        assert caught.value.signal == signum
        with pytest.raises(EngineError, match="cannot go on"):
            answers(llm)


def test_an_idle_engine_notices_too(model):
    with Left(), started(model) as llm:
        executor = llm.client.engine.executor
        executor.check()
        os.kill(workers(llm)[0], signal.SIGTERM)
        with pytest.raises(WorkerDied):
            until(executor.check, 10)


def test_what_a_worker_raises_is_raised_here(model):
    with Left(), started(model, "tests.poison_ranks") as llm:
        with pytest.raises(EngineError, match=r"worker 0 failed \(RuntimeError: poisoned\)"):
            answers(llm, prompts=[list(RAISE)])


def test_workers_die_with_a_process_that_is_killed(model):
    program = (
        "from tests.executor.test_multiproc import *; import sys; llm = started(json.loads(sys.argv[1]))\n"
        "print(*workers(llm), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, json.dumps(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        pid = int(child.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        child.kill()
    until(lambda: is_gone(pid), 5)


def test_a_process_that_was_forked_off_starts_workers_of_its_own():
    """It has none of the threads of its parent, which has started some, too."""
    program = (
        "import os, sys; from quire.executor._processes import end, take\n"
        "def start(): end(take('quire.worker.process', 1))\n"
        "start(); child = os.fork(); start()\n"
        "sys.exit(os.waitpid(child, 0)[1] if child else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- behind a server ---------------------------------------------------------------------------------------------------


def run(scenario, options: dict, executor: str = "mp", **serving) -> None:
    """Runs `scenario(llm)` on a fresh AsyncLLM; nothing is left."""

    async def main() -> None:
        config = ServingConfig(watchdog_s=5, **serving)
        async with AsyncLLM(serving=config, distributed_executor_backend=executor, **options) as llm:
            pids = [core := llm.cores.supervisors[0].core.pid, *children(core)]
            await asyncio.wait_for(scenario(llm), 120)
            pids += [core := llm.cores.supervisors[0].core.pid, *children(core)]
        assert all(map(is_gone, pids))

    with Left():
        asyncio.run(main())


async def answer(llm: AsyncLLM, prompt: list[int], num_tokens: int = 60) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return (await (await llm.submit(prompt, params)).wait()).choices[0].token_ids


async def worker_of(llm: AsyncLLM) -> int:
    (pid,) = children(llm.cores.supervisors[0].core.pid)
    return pid


def test_streams_go_on_when_a_worker_is_killed(model):
    """And nobody is blamed for it."""
    options = {**model, "max_num_seqs": 16}

    async def scenario(llm: AsyncLLM) -> None:
        expected = await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))
        for _ in range(2):
            streams = [asyncio.create_task(answer(llm, prompt)) for prompt in PROMPTS]
            while not llm.cores.supervisors[0].stats.num_running:
                await asyncio.sleep(0.001)
            os.kill(await worker_of(llm), signal.SIGKILL)
            assert await asyncio.gather(*streams) == expected
        assert llm.cores.supervisors[0].num_restarts == 2
        assert not llm.cores.supervisors[0].blame.watches

    run(scenario, options)


@pytest.mark.parametrize("poison", long_but(["raise", "exit", "crash"], "crash"))
def test_a_request_that_takes_a_worker_down_fails_alone(model, poison):
    async def scenario(llm: AsyncLLM) -> None:
        expected = await asyncio.gather(*(answer(llm, prompt, 20) for prompt in PROMPTS))
        streams = [asyncio.create_task(answer(llm, prompt, 20)) for prompt in PROMPTS]
        with pytest.raises(PoisonError):
            await answer(llm, list(POISONS[poison]))
        assert await asyncio.gather(*streams) == expected

    run(scenario, {**model, "max_num_seqs": 16}, "tests.poison_ranks")


def test_a_core_without_work_notices_that_its_worker_died(model):
    async def scenario(llm: AsyncLLM) -> None:
        await answer(llm, PROMPTS[0], 4)
        os.kill(await worker_of(llm), signal.SIGKILL)
        while not llm.cores.supervisors[0].num_restarts:
            await asyncio.sleep(0.01)
        await answer(llm, PROMPTS[0], 4)

    run(scenario, model)


def test_a_core_that_stands_by_has_a_worker_that_waits(model):
    async def scenario(llm: AsyncLLM) -> None:
        await asyncio.sleep(SPARE_DELAY_S)
        while llm.cores.supervisors[0].spare is None or not children(llm.cores.supervisors[0].spare.pid):
            await asyncio.sleep(0.01)
        (waiting,) = children(spare := llm.cores.supervisors[0].spare.pid)
        os.kill(await worker_of(llm), signal.SIGKILL)
        while llm.cores.supervisors[0].core.pid != spare:
            await asyncio.sleep(0.01)
        await answer(llm, PROMPTS[0], 4)
        assert await worker_of(llm) == waiting

    run(scenario, model)


def test_a_worker_that_is_stopped_is_replaced(model):
    async def scenario(llm: AsyncLLM) -> None:
        expected = await answer(llm, PROMPTS[0])
        stopped = await worker_of(llm)
        os.kill(stopped, signal.SIGSTOP)
        assert await answer(llm, PROMPTS[0]) == expected
        assert is_gone(stopped)

    run(scenario, model)


def test_a_server_says_why_its_worker_cannot_start(model):
    async def main() -> None:
        options = {**model, "max_model_len": 2048, "num_gpu_blocks_override": 2}
        async with AsyncLLM(distributed_executor_backend="mp", **options):
            pass

    with Left(), pytest.raises(CapacityError):
        asyncio.run(main())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_says_what_each_worker_holds_and_leaves_nothing(model, signum):
    flags = "--device cpu --dtype float32 --load-format dummy --max-model-len 128 --kv-cache-memory-bytes 16M -tp 2"
    command = [*QUIRE, model["model"], "--tokenizer", model["tokenizer"], *flags.split()]
    with ServerProcess(command, "/ready") as server:
        said = [line for line in server.log_tail().splitlines() if " core " in line]
        holding = (
            r"worker {} \(stage 0, place {}\): \d+ MB of weights, memory for \d+ blocks of 16 tokens, of which \d+"
        )
        assert len(said) == 2  # and nothing else
        assert all(re.search(holding.format(rank, rank), line) for rank, line in enumerate(said)), said
        pids = family(server.pid)
        assert len(pids) >= 4  # API, core, two workers
        assert [len(listening_inodes(pid)) for pid in pids if pid != server.pid] == [0] * (len(pids) - 1)
        assert len(listening_inodes(server.pid)) == 1
        assert server.end_by(signum) == (0 if signum == signal.SIGTERM else -signum)
        assert server.leftovers() == []
