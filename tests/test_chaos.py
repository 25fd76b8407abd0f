"""Chaos: the engine is killed and stopped under 64 streams, and no client can tell.

The whole thing: `quire serve` as a process, the `openai` client over HTTP, signals to the core from outside.
"""

import asyncio
import json
import os
import random
import signal
import time

import openai
import pytest
from benchmarks.server_process import QUIRE, ServerProcess, children

from tests.long import long_but
from tests.poison import POISONS
from tests.prompts import PROMPTS

# The small model would be done before a client has read much: it waits between its steps.
EXECUTOR = {
    "the default model": "tests.poison_real",
    "a small one": "tests.poison_real:20",
    "two ranks": "tests.poison_ranks:1,20",
    "two engines": "tests.poison_real:20",
}
NUM_STREAMS = {"the default model": 16, "a small one": 64, "two ranks": 32, "two engines": 32}
MAX_TOKENS = {"the default model": 32, "a small one": 128, "two ranks": 128, "two engines": 160}
# The small one guesses tokens, however many requests run.
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens_per_batch_size": [[1, 1000, 3]]}
MORE = {
    "a small one": ["--speculative-config", json.dumps(NGRAM)],
    "two ranks": ["-tp", "2"],
    "two engines": ["-dp", "2"],
}
POISONED = long_but(
    [(server, poison) for server in MORE for poison in ("raise", "exit", "hang")],
    *(("a small one", "raise"), ("two ranks", "hang"), ("two engines", "exit")),
)
WATCHDOG_S = 3
MOVES_WITHIN_S = 6.0  # or, on slow machines, within twice the time a first start and the first tokens take there
PATIENCE = 4  # watchdogs until a core that stands still is replaced: patience grows with the longest step


@pytest.fixture(scope="module")
def server(request, served_llama):
    """Of the model that a test asks for. In float32, so that no sum depends on what else is in the batch."""
    model = ["smollm2", "--dtype", "float32"] if request.param == "the default model" else served_llama
    flags = f"--executor {EXECUTOR[request.param]} --watchdog-s {WATCHDOG_S} --max-model-len 512"
    flags = [*flags.split(), *MORE.get(request.param, []), "--kv-cache-memory-bytes", "512M"]
    started = time.monotonic()
    with ServerProcess([*QUIRE, *model, *flags], "/ready") as server:
        server.max_tokens = MAX_TOKENS[request.param]
        server.prompts = [
            PROMPTS[i % len(PROMPTS)] + " " * (i // len(PROMPTS)) for i in range(NUM_STREAMS[request.param])
        ]
        server.start_s = time.monotonic() - started
        server.has_workers = bool(children(server.core_pids[0]))
        yield server
        assert server.stop() == 0
        assert server.leftovers() == []


class Streams:
    """One stream per prompt, read to the end; remembers what came and when."""

    def __init__(self, server: ServerProcess, prompts: list) -> None:
        self.max_tokens = server.max_tokens
        self.client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=400)
        self.texts = [""] * len(prompts)
        self.num_events = [0] * len(prompts)
        self.token_ids: list[list[int]] = [[] for _ in prompts]
        self.started = time.monotonic()
        self.first_s = 0.0  # until the first event
        self.tasks = [asyncio.create_task(self._read(idx, prompt)) for idx, prompt in enumerate(prompts)]

    async def _read(self, idx: int, prompt: str | list[int]) -> None:
        extra = {"ignore_eos": True, "return_token_ids": True}
        stream = await self.client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=self.max_tokens, temperature=0, stream=True, extra_body=extra
        )
        async for chunk in stream:
            choice = chunk.choices[0]
            self.texts[idx] += choice.text
            self.token_ids[idx] += getattr(choice, "token_ids", None) or []
            self.num_events[idx] += 1
            self.first_s = self.first_s or time.monotonic() - self.started

    @property
    def unfinished(self) -> bool:
        return not all(task.done() for task in self.tasks)

    async def until_events(self, count: int) -> None:
        """Waits until that many more events came, all streams together."""
        goal = sum(self.num_events) + count
        while sum(self.num_events) < goal and self.unfinished:
            await asyncio.sleep(0.01)

    async def finish(self) -> None:
        await asyncio.gather(*self.tasks)


async def hurt(server: ServerProcess, streams: Streams, how: signal.Signals, of_core: bool = False) -> float:
    """Sends a core a signal, or one of its workers if it has any, and waits until it is gone and a stream moves.

    Returns how long that took, in seconds.
    """
    pid = random.choice(server.core_pids)
    os.kill(pid if of_core else random.choice(children(pid) or [pid]), how)
    started = time.monotonic()
    await asyncio.sleep(0.3)  # what was under way arrives
    while pid in server.core_pids:
        await asyncio.sleep(0.05)
    await streams.until_events(1)
    assert streams.unfinished
    return time.monotonic() - started


@pytest.mark.parametrize("server", long_but(MAX_TOKENS, "a small one", "two ranks", "two engines"), indirect=True)
def test_streams_survive_three_kills_and_a_stop(server):
    prompts = server.prompts

    async def undisturbed() -> Streams:
        streams = Streams(server, prompts)
        await streams.finish()
        return streams

    async def disturbed() -> tuple[Streams, list[float], float]:
        streams = Streams(server, prompts)
        moments = random.Random(time.time_ns())
        pauses = []
        for _ in range(3):
            await streams.until_events(moments.randint(1, len(prompts) * 3))
            pauses.append(await hurt(server, streams, signal.SIGKILL))
        if server.has_workers:
            await streams.until_events(1)
            pauses.append(await hurt(server, streams, signal.SIGKILL, of_core=True))
        await streams.until_events(moments.randint(1, len(prompts) * 3))
        stopped = await hurt(server, streams, signal.SIGSTOP)
        await streams.finish()
        return streams, pauses, stopped

    truth = asyncio.run(undisturbed())
    streams, pauses, stopped = asyncio.run(disturbed())
    assert all(len(ids) == server.max_tokens for ids in streams.token_ids)  # none lost, none twice
    assert streams.texts == truth.texts
    assert streams.token_ids == truth.token_ids
    moves_within_s = max(MOVES_WITHIN_S, 2 * (server.start_s + truth.first_s))
    shown = ", ".join(f"{pause:.1f}" for pause in pauses)
    print(
        f"streams moved again after {shown} s (allowed: {moves_within_s:.1f} here, {MOVES_WITHIN_S:.1f} on a quiet "
        f"machine); after a stop {stopped:.1f} s ({PATIENCE * WATCHDOG_S:.1f} more are allowed)"
    )
    assert max(pauses) <= moves_within_s
    assert stopped <= PATIENCE * WATCHDOG_S + moves_within_s


@pytest.mark.parametrize(("server", "poison"), POISONED, indirect=["server"])
def test_a_poisoned_request_fails_alone_among_many_others(server, poison):
    async def scenario() -> tuple[Streams, openai.APIStatusError]:
        streams = Streams(server, server.prompts)
        unique = random.randrange(1000, 40_000)  # who made the engine fail is refused when it comes again
        poisoned = Streams(server, [[*POISONS[poison], unique]])
        with pytest.raises(openai.APIStatusError) as refused:
            await poisoned.finish()
        await streams.finish()
        return streams, refused.value

    cores = server.core_pids
    streams, refused = asyncio.run(scenario())
    assert len(set(cores) - set(server.core_pids)) == 1  # other cores are as they were
    assert refused.status_code == 500
    assert "others are not affected" in refused.message
    assert all(len(ids) == server.max_tokens for ids in streams.token_ids)
