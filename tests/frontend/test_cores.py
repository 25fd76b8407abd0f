"""Several cores behind one AsyncLLM: who takes which request, and that a core's trouble stays that core's."""

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest

from quire import LLM
from quire.config import ServingConfig
from quire.errors import ConfigError, DeadlineError, EngineError, OverloadedError, PoisonError, RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.cores import Cores
from quire.frontend.stream import Stream
from quire.kv.prefix import prefix_digests
from quire.messages import EngineStats
from tests.frontend.test_async_llm import answer, echoed, endless, open_files, prompts
from tests.long import long_but
from tests.poison import POISONS

BLOCK = 16


def run(scenario, executor="echo", serving=ServingConfig(watchdog_s=5, standby=False), size=2, **options):
    """Runs `scenario(llm)` on a fresh AsyncLLM with two cores, and leaves nothing behind."""

    async def main():
        settings = {"model": "smollm2", "data_parallel_size": size, **options}
        async with AsyncLLM(executor=executor, serving=serving, **settings) as llm:
            folders = [each._folder for each in llm.cores.supervisors]
            await asyncio.wait_for(scenario(llm), 120)
            pids = core_pids(llm)
        assert not any(folder.exists() for folder in folders)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    before = open_files()
    asyncio.run(main())
    assert open_files() <= before


def core_pids(llm: AsyncLLM) -> list[int]:
    return [each.core.pid for each in llm.cores.supervisors]


def live(llm: AsyncLLM) -> list[int]:
    return [len(each.live) for each in llm.cores.supervisors]


def owner(llm: AsyncLLM, request_id: str) -> int:
    (found,) = [idx for idx, each in enumerate(llm.cores.supervisors) if request_id in each.live]
    return found


async def started(llm: AsyncLLM, prompts: list[list[int]], num_tokens: int) -> tuple[list[Stream], list[int]]:
    """Their streams, and how many each core got."""
    streams, counts = [], [0] * len(llm.cores.supervisors)
    for prompt in prompts:
        streams.append(await llm.submit(prompt, endless(num_tokens)))
        counts[owner(llm, streams[-1].request.request_id)] += 1
    return streams, counts


async def settled(llm: AsyncLLM) -> None:
    """Until cores have told of all that they did."""
    while llm.cores.num_live or any(each.num_to_compute for each in llm.cores.supervisors):
        await asyncio.sleep(0.01)


def test_requests_spread_over_cores_and_each_stream_is_whole(smollm2):
    async def scenario(llm):
        streams = [await llm.submit(prompt, endless(60)) for prompt in prompts(64)]
        assert live(llm) == [32, 32]
        for prompt, stream in zip(prompts(64), streams):
            assert (await stream.wait()).choices[0].token_ids == echoed(prompt, 60)
        assert llm.stats.num_running == 0 and llm.num_restarts == 0
        assert await llm.check() == "" and llm.health() is None

    run(scenario, "echo:100")


def test_a_core_with_a_long_prompt_to_compute_gets_no_more_while_others_have_nothing_to_do(smollm2):
    async def scenario(llm):
        await llm.submit(list(range(100, 1600)), endless(5), request_id="long")  # some thirty steps
        long = owner(llm, "long")
        for idx in range(8):
            await llm.submit([7, idx, 9], endless(200), request_id=f"short {idx}")
        assert [owner(llm, f"short {idx}") for idx in range(8)] == [1 - long] * 8
        await asyncio.sleep(0.3)  # the core has told of what is left
        await llm.submit([7, 8, 9], endless(5), request_id="one more")
        assert owner(llm, "one more") == 1 - long
        supervisor = llm.cores.supervisors[long]
        assert 0 < supervisor.stats.num_to_compute < 1500 and not supervisor.load.num_unanswered
        await llm.abort(list(llm.cores.live))

    run(scenario, "echo:20", max_num_batched_tokens=50, max_num_seqs=50)


def test_what_was_sent_counts_until_the_core_says_so_itself(smollm2):
    async def scenario(llm):
        first, second = llm.cores.supervisors
        for idx in range(20):
            await llm.submit([*range(idx, idx + 40)], endless(3))
        assert first.num_to_compute + second.num_to_compute == 20 * 40  # nothing was heard of the cores meanwhile
        await settled(llm)
        assert not first.load.num_unanswered and not second.load.num_unanswered
        assert first.stats.num_received + second.stats.num_received == 20

    run(scenario)


def test_a_request_with_a_known_prefix_goes_where_it_is_cached(smollm2):
    async def scenario(llm):
        prefixes = [[1000 * (idx + 1) + place for place in range(8 * BLOCK)] for idx in range(4)]
        for prefix in prefixes:
            await answer(llm, [*prefix, 5], endless(2))
        owners = [[idx for idx, each in enumerate(llm.cores.supervisors) if has(each, prefix)] for prefix in prefixes]
        assert sorted(owners) == [[0], [0], [1], [1]]
        for prefix, (expected,) in zip(prefixes, owners):
            stream = await llm.submit([*prefix, 6, 7], endless(2), request_id="again")
            assert owner(llm, "again") == expected
            assert (await stream.wait()).metrics.num_cached_tokens == 8 * BLOCK
            salted = await llm.submit([*prefix, 6, 7], endless(2), cache_salt="another's")
            assert (await salted.wait()).metrics.num_cached_tokens == 0

    def has(supervisor, prefix) -> bool:
        return set(prefix_digests([*prefix, 0], "", BLOCK)) <= supervisor.load.known

    run(scenario)


ORDERS = {
    "in turn": [idx % 8 for idx in range(64)],
    "one after the other": [idx // 8 for idx in range(64)],
    "at random": random.Random(22).sample([idx % 8 for idx in range(64)], 64),
}


async def eight_prefixes(llm: AsyncLLM, order: list[int], num_tokens: int) -> None:
    """The first of each prefix is answered before 64 streams come: nearly all hits of one core, and both are used."""
    prefixes = [[100 * (idx + 1) + place % 90 for place in range(num_tokens)] for idx in range(8)]
    for prefix in prefixes:
        await answer(llm, [*prefix, 5], endless(2))
    suffixes = [[3000 + place * 7 + idx for place in range(24)] for idx in range(64)]
    streams, counts = await started(llm, [prefixes[order[idx]] + suffixes[idx] for idx in range(64)], 24)
    assert max(counts) <= 40
    requests = [await stream.wait() for stream in streams]
    num_hits = sum(request.metrics.num_cached_tokens for request in requests)
    assert num_hits >= 0.95 * 64 * num_tokens  # all of which one core would have had
    assert all(len(request.choices[0].token_ids) == 24 for request in requests)


@pytest.mark.parametrize("num_tokens", [256, 1024])
@pytest.mark.parametrize("order", ORDERS)
def test_prefixes_are_found_again_and_no_core_is_overrun(smollm2, order, num_tokens):
    run(lambda llm: eight_prefixes(llm, ORDERS[order], num_tokens), "echo:100", max_model_len=2048)


def test_prefixes_are_found_again_by_a_real_model(smollm2_path, served_llama):
    options = {"model": served_llama[0], "tokenizer": str(smollm2_path), "load_format": "dummy", "dtype": "float32"}
    run(lambda llm: eight_prefixes(llm, ORDERS["at random"], 256), None, **options)


def test_a_prefix_that_all_have_is_learned_by_all_cores(smollm2):
    async def scenario(llm):
        prefix = list(range(100, 1124))
        await answer(llm, [*prefix, 5], endless(2))
        streams, counts = await started(llm, [[*prefix, idx] for idx in range(64)], 300)
        assert max(counts) <= 40
        for stream in streams:
            await stream.wait()
        await settled(llm)
        streams, counts = await started(llm, [[*prefix, idx] for idx in range(64)], 300)
        assert counts == [32, 32]
        cached = [(await stream.wait()).metrics.num_cached_tokens for stream in streams]
        assert set(cached) == {1024}

    run(scenario, "echo:100", max_model_len=2048)


def test_requests_with_a_new_prefix_follow_the_one_that_computes_it(smollm2):
    async def scenario(llm):
        new = list(range(100, 900))
        for idx in range(6):
            await llm.submit([*new, idx], endless(5), request_id=f"r{idx}")
        await llm.submit([5, 6, 7], endless(5), request_id="another")
        assert [owner(llm, f"r{idx}") for idx in range(6)] == [0] * 6 and owner(llm, "another") == 1
        assert llm.cores.supervisors[0].load.expected
        await llm.abort("r0")
        await settled(llm)
        assert not any(each.load.expected for each in llm.cores.supervisors)

    run(scenario, "echo:50")


def test_cores_tell_of_blocks_that_went(smollm2):
    async def scenario(llm):
        (first, second) = llm.cores.supervisors
        for idx in range(12):
            await answer(llm, [*range(100 * idx, 100 * idx + 97)], endless(2))
        assert 0 < len(first.load.known) < 20 and 0 < len(second.load.known) < 20  # of 36 blocks each
        assert await llm.reset_prefix_cache()
        await answer(llm, [1, 2, 3], endless(2))
        await answer(llm, [1, 2, 3], endless(2))
        await asyncio.sleep(1.2)  # an idle core says so with its next sign of life
        assert not first.load.known and not second.load.known

    run(scenario, num_gpu_blocks_override=20, max_model_len=256)


def test_a_killed_core_is_replaced_and_the_other_ones_streams_never_wait(smollm2):
    async def scenario(llm):
        gaps = {0: 0.0, 1: 0.0}

        async def read(idx: int, prompt: list[int]) -> list[int]:
            stream = await llm.submit(prompt, endless(200), request_id=f"r{idx}")
            core, last, tokens = owner(llm, f"r{idx}"), time.monotonic(), []
            async for updates in stream:
                now = time.monotonic()
                gaps[core], last = max(gaps[core], now - last), now
                tokens += updates[0].token_ids
            return tokens

        tasks = [asyncio.create_task(read(*each)) for each in enumerate(prompts(16))]
        await asyncio.sleep(0.5)
        before = core_pids(llm)
        os.kill(before[1], signal.SIGKILL)
        assert await asyncio.gather(*tasks) == [echoed(prompt, 200) for prompt in prompts(16)]
        after = core_pids(llm)
        assert after[0] == before[0] and after[1] != before[1]
        assert [each.num_restarts for each in llm.cores.supervisors] == [0, 1] and llm.num_restarts == 1
        assert gaps[0] < gaps[1] / 2

    run(scenario, "echo:100")


def test_while_a_core_is_replaced_others_get_new_requests_and_the_server_is_healthy(smollm2):
    async def scenario(llm):
        first, second = llm.cores.supervisors
        os.kill(first.core.pid, signal.SIGSTOP)
        while not first.num_restarts:
            await asyncio.sleep(0.01)
            assert llm.health() is None
        assert not first.load.known and first.num_to_compute == 0
        for idx in range(6):
            await llm.submit([1, 2, idx], endless(400), request_id=f"r{idx}")
        assert live(llm) == [0, 6]
        while not first.is_ready:
            await asyncio.sleep(0.01)
        await llm.submit([1, 2, 3], endless(4), request_id="after")
        assert owner(llm, "after") == 0
        await llm.abort(list(llm.cores.live))

    run(scenario, "echo:50", ServingConfig(watchdog_s=2, standby=False))


@pytest.mark.parametrize("poison", long_but(["raise", "exit", "hang"], "exit"))
def test_a_poisoned_request_fails_alone_and_the_other_core_never_restarts(smollm2, poison):
    async def scenario(llm):
        tasks = [asyncio.create_task(answer(llm, prompt)) for prompt in prompts(31)]
        await asyncio.sleep(0)
        poisoned = await llm.submit([*POISONS[poison], 5], endless(5), request_id="bad")
        bad = owner(llm, "bad")
        with pytest.raises(PoisonError, match="others are not affected"):
            await poisoned.wait()
        assert await asyncio.gather(*tasks) == list(map(echoed, prompts(31)))
        restarts = [each.num_restarts for each in llm.cores.supervisors]
        assert restarts[bad] > 0 and restarts[1 - bad] == 0
        for _ in range(4):  # whichever core would take it
            with pytest.raises(PoisonError, match="ten minutes"):
                await answer(llm, [*POISONS[poison], 5], endless(5))
        assert [each.num_restarts for each in llm.cores.supervisors] == restarts

    run(scenario, "tests.poison", ServingConfig(watchdog_s=2))


def test_a_core_that_gives_up_leaves_its_requests_to_nobody_and_the_others_serve(smollm2):
    async def scenario(llm):
        first, second = llm.cores.supervisors
        mine = await llm.submit([1, 2, 3], endless(5000), request_id="a")
        others = await llm.submit([4, 5, 6], endless(400), request_id="b")
        assert owner(llm, "a") == 0 and owner(llm, "b") == 1
        while first.failure is None:
            with contextlib.suppress(ProcessLookupError):
                if first.core.process is not None:
                    os.kill(first.core.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match="engine 0 died 8 times in a row"):
            await mine.wait()
        assert llm.health() is None and llm.failure is None
        assert await answer(llm, [7, 8, 9]) == echoed([7, 8, 9])
        assert (await others.wait()).choices[0].token_ids == echoed([4, 5, 6], 400)
        second.failure = EngineError("it, too")
        assert llm.failure is first.failure and llm.health() == str(first.failure)
        with pytest.raises(EngineError, match="engine 0"):
            await answer(llm, [7, 8, 9])
        second.failure = None

    run(scenario, "echo:100")


def test_ids_limits_aborts_and_deadlines_are_of_all_cores_together(smollm2):
    async def scenario(llm):
        for name in "abc":
            await llm.submit([1, 2, 3], endless(5000), request_id=name)
        assert sorted(live(llm)) == [1, 2] and set(llm.cores.live) == set("abc")
        for name in "abc":
            with pytest.raises(RequestError, match="there is a request"):
                await llm.submit([1, 2, 3], endless(5), request_id=name)
        late = await llm.submit([1, 2, 3], endless(5000), timeout_s=0.2)
        with pytest.raises(OverloadedError, match="4 requests are running or waiting"):
            await llm.submit([1, 2, 3], endless(5))
        with pytest.raises(DeadlineError):
            await late.wait()
        await llm.abort(["a", "c"])
        assert set(llm.cores.live) == {"b"}
        await llm.drain(0.1)
        assert not llm.cores.num_live

    run(scenario, "echo:50", ServingConfig(max_queued_requests=4, standby=False))


def test_all_cores_sleep_and_pause_together(smollm2):
    async def scenario(llm):
        streams = [await llm.submit(prompt, endless(100)) for prompt in prompts(4)]
        await asyncio.sleep(0.2)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused() and all(each.suspension.is_held for each in llm.cores.supervisors)
        await llm.resume_generation()
        await llm.sleep(mode="keep")
        assert await llm.is_sleeping() and llm.health() == "the engine is asleep"
        with pytest.raises(OverloadedError, match="asleep"):
            await answer(llm, [1, 2, 3])
        os.kill(core_pids(llm)[1], signal.SIGKILL)
        while not llm.num_restarts or not llm.cores.supervisors[1].is_ready:
            await asyncio.sleep(0.02)
        await llm.wake_up()
        assert llm.health() is None
        for prompt, stream in zip(prompts(4), streams):
            assert (await stream.wait()).choices[0].token_ids == echoed(prompt, 100)
        await answer(llm, [1, 2, 3])
        assert [each.suspension.state for each in llm.cores.supervisors] == ["awake", "awake"]

    run(scenario, "echo:50")


def test_a_core_that_cannot_start_fails_the_start_with_its_sentence(smollm2):
    async def main():
        llm = AsyncLLM("smollm2", executor="echo:fast", data_parallel_size=3)
        with pytest.raises(ConfigError, match="is no pace"):
            await llm.start()
        await llm.close()

    before = open_files()
    asyncio.run(main())
    assert open_files() <= before


def test_an_engine_with_two_cores_is_shut_down_at_once(smollm2):
    async def main():
        llm = AsyncLLM("smollm2", executor="echo:50", data_parallel_size=2)
        await llm.start()
        processes = [each.core.process for each in llm.cores.supervisors]
        stream = await llm.submit([1, 2, 3], endless(5000))
        llm.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            await stream.wait()
        for process in processes:
            await process.wait()
        await llm.close()

    asyncio.run(main())


def test_both_engines_are_in_one_page_of_metrics(smollm2):
    async def scenario(llm):
        await asyncio.gather(*(answer(llm, prompt, endless(10)) for prompt in prompts(8)))
        body = llm.metrics.render()[0].decode()
        for engine in "01":
            (line,) = [
                line
                for line in body.splitlines()
                if line.startswith("quire:generation_tokens_total") and f'engine="{engine}"' in line
            ]
            assert float(line.split()[-1]) == 40
        assert llm.metrics.totals()[1]["generation_tokens"] == 80

    run(scenario, "echo:100")


def test_the_counts_of_cores_are_added_up(smollm2):
    async def scenario(llm):
        first, second = llm.cores.supervisors
        assert llm.cores.num_kv_tokens == first.num_kv_tokens + second.num_kv_tokens > 0
        first.stats = EngineStats(num_running=2, kv_usage=0.5, accepted_drafts=[3, 1])
        second.stats = EngineStats(num_running=1, kv_usage=0.1, accepted_drafts=[1])
        stats = llm.stats
        assert stats.num_running == 3 and stats.kv_usage == pytest.approx(0.3) and stats.accepted_drafts == [4, 1]

    run(scenario)


def test_one_core_tells_nothing_of_prefixes_and_counts_no_work(smollm2):
    async def scenario(llm):
        await answer(llm, list(range(100)), endless(5))
        (only,) = llm.cores.supervisors
        assert not only.load.known and not only.load.prefix_block and not only.load._num_sent
        assert only.stats.num_received == only.stats.num_to_compute == 0
        assert llm.metrics.engines[0].name == "0"

    run(scenario, size=1)


def test_a_rank_of_a_balancer_elsewhere_is_one_core_with_that_name(smollm2):
    async def scenario(llm):
        assert len(llm.cores.supervisors) == 1 and isinstance(llm.cores, Cores)
        await answer(llm, [1, 2, 3], endless(5))
        assert 'engine="3"' in llm.metrics.render()[0].decode()

    run(scenario, data_parallel_size=4, data_parallel_rank=3)


def test_an_llm_has_one_engine():
    with pytest.raises(ConfigError, match="use AsyncLLM or quire serve"):
        LLM("smollm2", executor="echo", data_parallel_size=2)
