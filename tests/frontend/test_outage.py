"""A server whose machines are lost says so, and serves again when they are back; one that never had them ends."""

import asyncio
import os
import signal

import pytest

from quire import SamplingParams
from quire.config import ServingConfig
from quire.errors import ClusterError
from quire.frontend import supervisor
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.blame import MAX_DEATHS

OPTIONS = {"model": "smollm2", "max_model_len": 256, "device": "cpu"}
PARAMS = SamplingParams(max_tokens=100, ignore_eos=True)
SENTENCE = "the machines that compute this model are not all there: try again in a moment"


def test_requests_are_refused_until_the_machines_are_back(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "OUTAGE_PAUSE_S", 0.01)
    missing = tmp_path / "missing"

    async def scenario(llm: AsyncLLM) -> None:
        waits = asyncio.create_task((await llm.submit([3, 4, 5], PARAMS)).wait())
        missing.write_text("")
        core = llm.cores.supervisors[0]
        os.kill(core.core.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=SENTENCE):  # and nothing of addresses
            await waits
        while len(missing.read_text()) <= MAX_DEATHS + 1:  # it never gives up
            with pytest.raises(ClusterError, match=SENTENCE) as caught:
                await llm.submit([3, 4, 5], PARAMS)
            assert caught.value.retry_after_s > 0 and llm.health() == SENTENCE
            await asyncio.sleep(0.05)
        missing.unlink()
        while llm.health() is not None:
            await asyncio.sleep(0.05)
        answer = await (await llm.submit([3, 4, 5], PARAMS)).wait()
        assert len(answer.choices[0].token_ids) == 100
        assert core.num_restarts == 1

    async def main() -> None:
        backend = f"tests.few_machines:{missing}"
        serving = ServingConfig(standby=False)
        async with AsyncLLM(serving=serving, distributed_executor_backend=backend, **OPTIONS) as llm:
            await asyncio.wait_for(scenario(llm), 120)

    asyncio.run(main())


def test_a_server_that_never_had_enough_says_how_many_there_are(tmp_path):
    missing = tmp_path / "missing"
    missing.write_text("")

    async def main() -> None:
        async with AsyncLLM(distributed_executor_backend=f"tests.few_machines:{missing}", **OPTIONS):
            pass

    with pytest.raises(ClusterError, match=r"the Ray cluster has 1 \(1 at 10\.0\.0\.1\)") as caught:
        asyncio.run(main())
    assert caught.value.exit_code == 1
