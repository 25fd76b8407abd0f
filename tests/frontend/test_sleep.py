"""A sleeping server: requests are turned away, aborted, waited for or kept; a core that dies asleep stays asleep."""

import asyncio
import os
import signal

import pytest

from quire.config import ServingConfig
from quire.errors import OverloadedError
from tests.frontend.test_async_llm import GREEDY, answer, echoed, endless, run

PROMPT = [100, 200, 300]


def test_asleep_requests_are_turned_away(smollm2):
    async def scenario(llm):
        assert await answer(llm, PROMPT) == echoed(PROMPT)
        await llm.sleep()
        assert await llm.is_sleeping() and llm.health() == "the engine is asleep"
        with pytest.raises(OverloadedError, match="the engine is asleep"):
            await answer(llm, PROMPT)
        await llm.sleep()
        await asyncio.sleep(2.5)  # longer than the watchdog waits
        assert llm.num_restarts == 0
        await llm.wake_up()
        assert not await llm.is_sleeping() and llm.health() is None
        assert await answer(llm, PROMPT) == echoed(PROMPT)

    run(scenario, serving=ServingConfig(watchdog_s=2))


@pytest.mark.parametrize(
    "mode, reason, num_tokens", [("abort", "abort", None), ("wait", "length", 60), ("keep", "length", 60)]
)
def test_running_requests_are_aborted_waited_for_or_kept(smollm2, mode, reason, num_tokens):
    async def scenario(llm):
        stream = await llm.submit(PROMPT, endless(60))
        await anext(aiter(stream))
        await llm.sleep(mode=mode)
        request = stream.request
        assert request.finished == (mode != "keep")
        await llm.wake_up()
        await stream.wait()
        choice = request.choices[0]
        assert choice.finish_reason == reason
        assert choice.token_ids == echoed(PROMPT, num_tokens or len(choice.token_ids))
        assert await answer(llm, PROMPT) == echoed(PROMPT)

    run(scenario, executor="echo:50")


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_core_that_dies_asleep_comes_back_asleep(smollm2, mode):
    async def scenario(llm):
        stream = await llm.submit(PROMPT, endless(60))
        await anext(aiter(stream))
        await llm.sleep(mode=mode)
        (supervisor,) = llm.cores.supervisors
        os.kill(supervisor.core.pid, signal.SIGKILL)
        while not supervisor.num_restarts or not supervisor.is_ready:
            await asyncio.sleep(0.05)
        assert llm.health() == "the engine is asleep"
        await asyncio.sleep(1.5)
        await llm.wake_up()
        assert await answer(llm, PROMPT, GREEDY) == echoed(PROMPT)
        if mode == "keep":
            await stream.wait()
            assert stream.request.choices[0].token_ids == echoed(PROMPT, 60)

    run(scenario, executor="echo:50")
