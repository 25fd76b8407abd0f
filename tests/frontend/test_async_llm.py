"""AsyncLLM on an echo model: streams, limits, and streams that go on when the core dies."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire import AsyncEngineArgs, RequestOutputKind, SamplingParams
from quire.config import ServingConfig
from quire.errors import ConfigError, DeadlineError, EngineError, OverloadedError, PoisonError, RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stream import Stream
from tests.long import long_but
from tests.poison import POISONS

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def run(scenario, executor="echo", serving=ServingConfig(watchdog_s=5), **options):
    """Runs `scenario(llm)` on a fresh AsyncLLM and leaves nothing behind."""

    async def main():
        before = open_files()
        async with AsyncLLM("smollm2", executor=executor, serving=serving, **options) as llm:
            folder = llm.cores.supervisors[0]._folder
            result = await asyncio.wait_for(scenario(llm), 120)
            pid = llm.cores.supervisors[0].core.pid
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        return result, before

    result, before = asyncio.run(main())
    assert open_files() <= before
    return result


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams = GREEDY, **options) -> list[int]:
    stream = await llm.submit(prompt, params, **options)
    return (await stream.wait()).choices[0].token_ids


def echoed(prompt: list[int], num: int = 30) -> list[int]:
    return [prompt[idx % len(prompt)] for idx in range(len(prompt), len(prompt) + num)]


def prompts(count: int) -> list[list[int]]:
    return [[100 + idx, 200 + idx, 300 + idx] for idx in range(count)]


def endless(num_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def test_streams_give_each_token_once_and_in_order(smollm2):
    async def scenario(llm):
        async def read(prompt):
            updates = []
            async for news in await llm.submit(prompt, GREEDY):
                updates += news
            assert [update.finish_reason for update in updates] == [None] * (len(updates) - 1) + ["length"]
            text = llm.model.tokenizer.decode(echoed(prompt))
            assert "".join(update.text for update in updates) == text
            return list(itertools.chain.from_iterable(update.token_ids for update in updates))

        assert await asyncio.gather(*map(read, prompts(20))) == list(map(echoed, prompts(20)))

    run(scenario)


def test_generate_yields_growing_outputs(smollm2):
    async def scenario(llm):
        outputs = [output async for output in llm.generate("The quick brown fox jumps", GREEDY, request_id="mine")]
        assert all(output.request_id == "mine" for output in outputs)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths) and lengths[-1] == 30 and outputs[-1].finished

    run(scenario)


def test_outputs_hold_what_their_kind_says(smollm2):
    prompt = [500, 600, 700]

    async def scenario(llm):
        async def outputs(**fields):
            return [output async for output in llm.generate(prompt, endless(30, **fields), request_id="r", priority=1)]

        deltas = await outputs(output_kind=RequestOutputKind.DELTA, n=2)
        for index in range(2):
            ours = [choice for output in deltas for choice in output.outputs if choice.index == index]
            assert list(itertools.chain.from_iterable(choice.token_ids for choice in ours)) == echoed(prompt)
            assert "".join(choice.text for choice in ours) == llm.get_tokenizer().decode(echoed(prompt))
            assert [choice.finish_reason for choice in ours] == [None] * (len(ours) - 1) + ["length"]
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
        (final,) = await outputs(output_kind=RequestOutputKind.FINAL_ONLY)
        assert final.finished and final.outputs[0].token_ids == echoed(prompt)
        assert final.metrics.num_generation_tokens == 30

    run(scenario, "echo:200")


def test_a_reader_may_ask_for_several_tokens_at_once(smollm2):
    async def scenario(llm):
        params = endless(30, output_kind=RequestOutputKind.DELTA, stream_interval=8)
        counts = [len(output.outputs[0].token_ids) async for output in llm.generate([5, 6, 7], params)]
        assert sum(counts) == 30 and counts[0] == 1 and min(counts[1:-1]) >= 8

    run(scenario, "echo:50")


def test_an_engine_starts_with_its_first_request_and_is_shut_down_at_once(smollm2):
    async def scenario():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model="smollm2", executor="echo"))
        assert llm.cores is None and llm.is_running and not llm.errored
        await llm.check_health()
        both = [[output async for output in llm.generate(prompt, GREEDY)] for prompt in prompts(2)]
        assert [outputs[-1].outputs[0].token_ids for outputs in both] == list(map(echoed, prompts(2)))
        await llm.check_health()
        folder, process = llm.cores.supervisors[0]._folder, llm.cores.supervisors[0].core.process
        running = asyncio.create_task(answer(llm, [1, 2, 3], endless(5000)))
        await asyncio.sleep(0.1)
        llm.shutdown()
        assert not llm.is_running and llm.is_stopped
        with pytest.raises(EngineError, match="shut down"):
            await running
        await process.wait()
        assert not folder.exists()

    before = open_files()
    asyncio.run(scenario())
    assert open_files() <= before


def test_a_prefix_cache_is_reset_unless_requests_run(smollm2):
    async def scenario(llm):
        prompt = list(range(100, 200))

        async def num_cached():
            return [output async for output in llm.generate(prompt, GREEDY)][-1].num_cached_tokens

        assert [await num_cached(), await num_cached()] == [0, 96]
        assert await llm.reset_prefix_cache() is True
        assert await num_cached() == 0
        stream = await llm.submit([1, 2, 3], endless(200))
        await moving(llm)
        assert await llm.reset_prefix_cache() is False
        assert await llm.reset_prefix_cache(reset_running_requests=True) is True
        assert (await stream.wait()).choices[0].token_ids == echoed([1, 2, 3], 200)
        assert await llm.check() == ""

    run(scenario, "echo:200")


def test_a_server_gives_no_more_answers_and_logprobs_than_its_operator_says(smollm2):
    async def scenario(llm):
        for fields in ({"n": 5}, {"logprobs": 3}, {"prompt_logprobs": -1}):
            with pytest.raises(RequestError, match=f"{next(iter(fields))} must be at most"):
                await llm.submit([1, 2, 3], SamplingParams(**fields))
        assert len((await (await llm.submit([1, 2, 3], SamplingParams(n=4))).wait()).choices) == 4

    run(scenario, serving=ServingConfig(max_n=4, max_logprobs=2))


def test_a_long_text_is_tokenized_off_the_loop(smollm2):
    async def scenario(llm):
        worst = 0.0
        last = time.monotonic()

        async def heart():
            nonlocal worst, last
            while True:
                await asyncio.sleep(0.001)
                now = time.monotonic()
                worst = max(worst, now - last)
                last = now

        beating = asyncio.create_task(heart())
        with pytest.raises(RequestError, match="maximum context length"):
            await llm.submit("word " * 400_000, GREEDY)
        beating.cancel()
        assert worst < 0.5

    run(scenario)


@pytest.mark.parametrize("num_kills", long_but([1, 3], 1))
def test_a_killed_core_is_replaced_and_no_stream_notices(smollm2, num_kills):
    async def scenario(llm):
        tasks = [asyncio.create_task(answer(llm, prompt, endless(200))) for prompt in prompts(16)]
        for kill in range(num_kills):
            await moving(llm)
            os.kill(llm.cores.supervisors[0].core.pid, signal.SIGKILL)
            while llm.num_restarts <= kill:
                await asyncio.sleep(0.01)
        assert await asyncio.gather(*tasks) == [echoed(prompt, 200) for prompt in prompts(16)]
        assert llm.num_restarts == num_kills
        assert await llm.check() == ""

    run(scenario, "echo:100")


def test_vectors_come_beside_answers_and_survive_a_kill(smollm2):
    """The echo model's vector is the prompt's tokens. A step takes 0.1 s, so the core dies before the first ends."""

    async def scenario(llm):
        answers = [asyncio.create_task(answer(llm, prompt)) for prompt in prompts(8)]
        streams = [await llm.submit(prompt, GREEDY, wants_vector=True) for prompt in prompts(8)]
        os.kill(llm.cores.supervisors[0].core.pid, signal.SIGKILL)
        for prompt, stream in zip(prompts(8), streams):
            request = await stream.wait()
            assert request.vector == prompt
            assert request.choices[0].token_ids == [] and request.choices[0].finish_reason == "stop"
        assert await asyncio.gather(*answers) == list(map(echoed, prompts(8)))
        assert llm.num_restarts == 1

    run(scenario, executor="echo:10")


def test_logprobs_and_choices_survive_a_kill(smollm2):
    async def scenario(llm):
        stream = await llm.submit([5, 6, 7], endless(100, n=3))
        await moving(llm)
        os.kill(llm.cores.supervisors[0].core.pid, signal.SIGKILL)
        request = await stream.wait()
        assert [choice.token_ids for choice in request.choices] == [echoed([5, 6, 7], 100)] * 3

    run(scenario, "echo:100")


def test_a_core_that_stands_still_is_replaced(smollm2):
    async def scenario(llm):
        task = asyncio.create_task(answer(llm, [1, 2, 3], endless(100)))
        await moving(llm)
        assert llm.health() is None
        os.kill(llm.cores.supervisors[0].core.pid, signal.SIGSTOP)
        assert await task == echoed([1, 2, 3], 100)
        assert llm.num_restarts == 1

    run(scenario, "echo:100", ServingConfig(watchdog_s=1))


def test_an_idle_core_that_stands_still_is_noticed(smollm2):
    async def scenario(llm):
        os.kill(llm.cores.supervisors[0].core.pid, signal.SIGSTOP)
        while llm.num_restarts == 0:
            await asyncio.sleep(0.05)
        assert await answer(llm, [1, 2, 3]) == echoed([1, 2, 3])

    run(scenario, serving=ServingConfig(watchdog_s=1.5))


@pytest.mark.parametrize("poison", long_but(POISONS, "raise", "exit"))
def test_a_poisoned_request_fails_alone(smollm2, poison):
    async def scenario(llm):
        tasks = [asyncio.create_task(answer(llm, prompt)) for prompt in prompts(31)]
        poisoned = asyncio.create_task(answer(llm, [*POISONS[poison], 5]))
        with pytest.raises(PoisonError, match="others are not affected"):
            await poisoned
        assert await asyncio.gather(*tasks) == list(map(echoed, prompts(31)))
        restarts = llm.num_restarts
        with pytest.raises(PoisonError, match="ten minutes"):
            await answer(llm, [*POISONS[poison], 5])
        assert await answer(llm, [9, 9, 9]) == [9] * 30
        assert llm.num_restarts == restarts

    run(scenario, "tests.poison", ServingConfig(watchdog_s=1))


def test_a_core_that_always_falls_makes_the_engine_give_up(smollm2):
    async def scenario(llm):
        task = asyncio.create_task(answer(llm, [1, 2, 3], endless(8000)))
        await moving(llm)
        while llm.failure is None:
            with contextlib.suppress(ProcessLookupError):
                if llm.cores.supervisors[0].core.process is not None:
                    os.kill(llm.cores.supervisors[0].core.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match="8 times in a row"):
            await task
        with pytest.raises(EngineError):
            await answer(llm, [1, 2, 3])
        assert "giving up" in llm.health()

    run(scenario, "echo:20")


def test_an_abort_ends_the_stream_and_frees_the_core(smollm2):
    async def scenario(llm):
        stream = await llm.submit([1, 2, 3], endless(5000), request_id="x")
        updates = []
        async for news in stream:
            updates += news
            if len(updates) == 3:
                await llm.abort("x")
        assert updates[-1].finish_reason == "abort"
        while llm.stats.num_running or llm.stats.kv_usage:
            await asyncio.sleep(0.01)
        assert await llm.check() == ""

    run(scenario, "echo:100")


def test_a_deadline_is_honoured_while_running_and_while_waiting(smollm2):
    async def scenario(llm):
        first = await llm.submit([1, 2, 3], endless(5000), timeout_s=2.5)
        second = await llm.submit([4, 5, 6], endless(5000), timeout_s=0.3)
        started = time.monotonic()
        with pytest.raises(DeadlineError, match="timeout_s"):
            await second.wait()
        assert time.monotonic() - started < 2.2  # it does not wait for the first
        assert second.request.choices[0].token_ids == []
        with pytest.raises(DeadlineError):
            await first.wait()
        assert first.request.choices[0].token_ids
        while llm.stats.num_running or llm.stats.num_waiting:
            await asyncio.sleep(0.01)

    run(scenario, "echo:50", max_num_seqs=1)


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(smollm2):
    async def scenario(llm):
        streams = [await llm.submit([1, 2, last], GREEDY) for last in range(4)]
        with pytest.raises(OverloadedError, match="which is the limit") as refused:
            await llm.submit([1, 2, 3], GREEDY)
        assert refused.value.retry_after_s > 0
        await asyncio.gather(*(stream.wait() for stream in streams))
        assert await answer(llm, [1, 2, 3]) == echoed([1, 2, 3])

    run(scenario, "echo:100", ServingConfig(max_queued_requests=4))


def test_draining_finishes_what_runs_and_takes_nothing_new(smollm2):
    async def scenario(llm):
        task = asyncio.create_task(answer(llm, [1, 2, 3]))
        longest = await llm.submit([1, 2, 4], endless(8000))
        await moving(llm)
        draining = asyncio.create_task(llm.drain(1.0))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match="stopping"):
            await answer(llm, [1, 2, 3])
        assert await task == echoed([1, 2, 3])
        await draining
        assert (await longest.wait()).choices[0].finish_reason == "abort"

    run(scenario, "echo:100")


def test_two_requests_cannot_share_an_id(smollm2):
    async def scenario(llm):
        await llm.submit([1, 2, 3], GREEDY, request_id="a")
        with pytest.raises(RequestError, match="already"):
            await llm.submit([1, 2, 3], GREEDY, request_id="a")
        # Long prompts are tokenized by another thread: both are under way before either is taken in.
        long = "many words " * 3000
        submissions = [llm.submit(long, GREEDY, request_id="b") for _ in range(2)]
        both = await asyncio.gather(*submissions, return_exceptions=True)
        assert sorted(isinstance(each, RequestError) for each in both) == [False, True]

    run(scenario, "echo:50")


def test_what_keeps_a_core_from_starting_is_raised(smollm2):
    async def scenario():
        llm = AsyncLLM("smollm2", executor="echo", kv_cache_memory_bytes=64)
        with pytest.raises(ConfigError, match="max_model_len|max-model-len"):
            await llm.start()

    asyncio.run(scenario())


def test_pickles_and_noise_on_the_socket_are_dropped(smollm2):
    import pickle

    import zmq

    async def scenario(llm):
        raw = zmq.Socket.shadow(llm.cores.supervisors[0].core.socket)
        for junk in (pickle.dumps(print), b"", b"\xff" * 100, os.urandom(1000)):
            raw.send(junk)
        assert await answer(llm, [1, 2, 3]) == echoed([1, 2, 3])
        assert llm.num_restarts == 0

    run(scenario)


def test_a_core_does_not_outlive_its_frontend(smollm2):
    program = (
        "import asyncio, os; from quire.frontend.async_llm import AsyncLLM\n"
        "async def main():\n"
        "    llm = AsyncLLM('smollm2', executor='echo'); await llm.start()\n"
        "    (each,) = llm.cores.supervisors\n"
        "    print(each.core.pid, each._folder, flush=True); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    pid, folder = done.stdout.split()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the core is still there")
    for path in Path(folder).iterdir():
        path.unlink()
    Path(folder).rmdir()


def test_the_frontend_has_no_torch(smollm2):
    program = (
        "import asyncio, sys; from quire.frontend.async_llm import AsyncLLM; from quire import SamplingParams\n"
        "async def main():\n"
        "    async with AsyncLLM('smollm2', executor='echo') as llm:\n"
        "        await llm.encode_chat([{'role': 'user', 'content': 'Hi'}])\n"
        "        async for o in llm.generate('Hello there', SamplingParams(max_tokens=4)): pass\n"
        "asyncio.run(main()); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


async def moving(llm: AsyncLLM) -> None:
    """Waits until every live request has a token in this epoch's core."""
    while llm.health() is not None:
        await asyncio.sleep(0.01)
    live = llm.cores.live
    seen = {request_id: num_tokens(stream) for request_id, stream in live.items()}
    while any(num_tokens(live[request_id]) <= count for request_id, count in seen.items() if request_id in live):
        await asyncio.sleep(0.01)


def num_tokens(stream: Stream) -> int:
    return len(stream.request.choices[0].token_ids)
