"""Hours of mixed load on a real server: streams, whole answers, mistakes, deadlines, and clients that disconnect.

    python benchmarks/soak.py --seconds 3600 [--clients 24] [-- more flags of quire serve]

Between rounds the clients pause and the server must be as it was: no request left, the KV cache's bookkeeping in
order, no zombie, no more memory or file descriptors than after the warm-up. At the end it is told to stop amid streams
and must leave nothing behind. Exit status 1 if any of this does not hold.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tqdm import tqdm  # noqa: E402

from benchmarks.server_process import QUIRE, ServerProcess, children, memory_bytes, num_files, state  # noqa: E402
from quire.bench.http_client import Failure, HttpClient, HttpReply, StreamedReply  # noqa: E402
from quire.bench.loadgen import WORDS  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHECK = "/admin/check"  # {"problem": ""} while the core's bookkeeping is in order
ADMIN_KEY = "soak"
MAX_GROWTH = 0.05
WARM_UP = 1 / 3  # of the rounds
QUIET_S = 30.0  # the server may take to finish what clients left behind
# A small cache is soon touched everywhere, and makes requests wait, be preempted and evict each other's prefixes.
CACHE_FLAGS = "--max-model-len 512 --kv-cache-memory-bytes 64M"
QUEUE_FLAGS = "--max-num-seqs 16 --max-queued-requests 64"
FLAGS = [*CACHE_FLAGS.split(), *QUEUE_FLAGS.split(), "--no-access-log"]
# Torch keeps a compiled matrix product for each number of rows it has met (two caches of 1,024), and glibc the memory
# freed between them: hundreds of MiB on CPUs without bfloat16 instructions, which would hide a leak. These limits are
# reached in the warm-up.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32", "MALLOC_MMAP_THRESHOLD_": "65536"}


class Sample(NamedTuple):
    """The server at rest, after a round."""

    api_bytes: int
    core_bytes: int
    api_files: int
    core_files: int


class Soak:
    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.drafts: dict[str, int] = {}  # verified so far, and how many of them were right
        self.prefixes = [self.words(40) for _ in range(4)]

    async def run(self, seconds: float, num_clients: int) -> list[Sample]:
        """Load and rest in turn; one sample per rest."""
        samples: list[Sample] = []
        num_rounds = max(6, min(60, round(seconds / 5)))
        with tqdm(total=num_rounds, unit="round") as bar:
            for _ in range(num_rounds):
                async with HttpClient(self.server.url, ADMIN_KEY) as client:
                    until_s = time.monotonic() + seconds / num_rounds
                    await asyncio.gather(*(self.client(client, until_s) for _ in range(num_clients)))
                    samples.append(await self.rest(client))
                memory = f"{samples[-1].api_bytes >> 20} + {samples[-1].core_bytes >> 20} MiB"
                bar.set_postfix_str(f"{sum(self.outcomes.values())} requests, {memory}")
                bar.update()
        return samples

    # -- load ------------------------------------------------------------------------------------------------------

    async def client(self, client: HttpClient, until_s: float) -> None:
        acts = [
            self.stream,
            self.stream,
            self.whole,
            self.leave,
            self.leave,
            self.mistake,
            self.deadline,
            self.half_a_request,
        ]
        while time.monotonic() < until_s:
            act = self.rng.choice(acts)
            try:
                outcome = await act(client)
            except Failure as failure:
                outcome = failure.kind
            self.outcomes[f"{act.__name__}: {outcome}"] += 1
            if outcome not in ("ok", "http 503"):
                self.problems.append(f"{act.__name__}: {outcome}")
            if outcome == "http 503":
                await asyncio.sleep(0.1)

    async def stream(self, client: HttpClient) -> str:
        path, body = self.request(stream=True)
        answer = StreamedReply()
        await client.post(path, body, answer)
        answer.check()
        return "ok"

    async def whole(self, client: HttpClient) -> str:
        path, body = self.request()
        reply = await client.post(path, body, HttpReply())
        return "ok" if reply.status == 200 else f"http {reply.status}"

    async def leave(self, client: HttpClient) -> str:
        """The client goes away: before, during or just after the answer."""
        path, body = self.request(stream=self.rng.random() < 0.7)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.expovariate(4)):
                await client.post(path, body, StreamedReply())
        return "ok"

    async def mistake(self, client: HttpClient) -> str:
        mistakes = [{"temperature": -1}, {"n": 0}, {"max_tokens": "many"}, {"prompt": self.words(2000)}]
        path, body = self.request(**self.rng.choice(mistakes))
        if self.rng.random() < 0.2:
            body = body[:-5]
        reply = await client.post(path, body, HttpReply())
        return "ok" if reply.status == 400 else f"http {reply.status}"

    async def deadline(self, client: HttpClient) -> str:
        path, body = self.request(timeout_s=self.rng.uniform(0.01, 0.5))
        reply = await client.post(path, body, HttpReply())
        return "ok" if reply.status in (200, 408) else f"http {reply.status}"

    async def half_a_request(self, client: HttpClient) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        headers = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n"
        request = b"POST /v1/completions HTTP/1.1\r\n" + headers + b"\r\n{" + b" " * 300
        writer.write(request[: self.rng.randrange(len(request))])
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        writer.transport.abort()
        return "ok"

    def request(self, **options: Any) -> tuple[str, bytes]:
        """(path, body) of a request like any other, changed by `options`."""
        rng = self.rng
        text = rng.choice(["", *self.prefixes]) + " " + self.words(rng.randint(1, 60))
        body: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 16, 16, 48]), "temperature": rng.choice([0, 1])}
        is_chat = rng.random() < 0.5 and "prompt" not in options
        body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        logprobs = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
        body |= rng.choice([{}, {}, {"n": 2}, {"stop": ["e"]}, logprobs])
        return CHAT if is_chat else COMPLETIONS, json.dumps(body | options).encode()

    def words(self, num_words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=num_words))

    # -- rest ------------------------------------------------------------------------------------------------------

    async def rest(self, client: HttpClient) -> Sample:
        """Waits until nothing runs and looks around."""
        deadline_s = time.monotonic() + QUIET_S
        while (left := await self.gauges(client))["running"] or left["waiting"]:
            if time.monotonic() > deadline_s:
                self.problems.append(f"requests nobody waits for are still there: {left}")
                break
            await asyncio.sleep(0.1)
        if left["restarts"]:
            self.problems.append("the engine was restarted")
        self.drafts = {name: int(left[name]) for name in ("drafts", "accepted")}
        reply = await client.get(CHECK)
        if reply.status != 200 or json.loads(reply.content)["problem"]:
            self.problems.append(f"the KV books: {reply.content.decode()[:200]}")
        for connection in client.idle:
            connection.transport.close()
        client.idle.clear()
        await asyncio.sleep(0.5)  # for the server to see them go
        server = self.server
        self.problems += [f"process {pid} is a zombie" for pid in children(server.pid) if state(pid) == "Z"]
        api_pid, core_pid = server.pid, server.core_pid
        return Sample(memory_bytes(api_pid), memory_bytes(core_pid), num_files(api_pid), num_files(core_pid))

    async def gauges(self, client: HttpClient) -> dict[str, float]:
        text = (await client.get("/metrics")).content.decode()
        names = {
            "running": "num_requests_running",
            "waiting": "num_requests_waiting",
            "restarts": "engine_restarts_total",
            "drafts": "spec_decode_num_draft_tokens_total",
            "accepted": "spec_decode_num_accepted_tokens_total",
        }
        found = {}
        for short, name in names.items():
            values = re.findall(rf"^quire:{name}{{.*}} (\S+)$", text, re.M)
            found[short] = sum(map(float, values))
        return found

    # -- the end ---------------------------------------------------------------------------------------------------

    async def stop_amid_streams(self) -> None:
        """SIGTERM while clients read: they get their answers, the server exits 0 and takes everything along."""
        pids = [self.server.pid, self.server.core_pid]
        async with HttpClient(self.server.url, ADMIN_KEY) as client:
            streams = [asyncio.create_task(self.stream(client)) for _ in range(8)]
            await asyncio.sleep(0.2)
            status = await asyncio.to_thread(self.server.stop)
            ends = await asyncio.gather(*streams, return_exceptions=True)
        self.problems += [f"a stream broke while the server stopped: {end}" for end in ends if end != "ok"]
        if status != 0:
            self.problems.append(f"the server's exit status is {status}")
        self.problems += [f"process {pid} is still there, in state {state(pid)}" for pid in pids if state(pid) != "X"]
        self.problems += self.server.leftovers()


def growth(samples: list[Sample]) -> dict[str, float]:
    """How much more there is at the end than after the warm-up, by medians of a few rests."""
    after = samples[round(len(samples) * WARM_UP) :]
    few = max(1, len(after) // 3)
    found = {}
    for name in Sample._fields:
        values = [getattr(sample, name) for sample in after]
        found[name] = statistics.median(values[-few:]) / statistics.median(values[:few]) - 1
    return found


def soak(
    seconds: float, num_clients: int = 24, seed: int = 0, model: str = "smollm2", flags: list[str] = []
) -> list[str]:
    """What is wrong after so many seconds; prints what happened."""
    command = [*QUIRE, model, "--admin-api-key", ADMIN_KEY, *FLAGS, *flags]
    with ServerProcess(command, "/ready", environment=ENVIRONMENT) as server:
        run = Soak(server, seed)
        samples = asyncio.run(run.run(seconds, num_clients))
        asyncio.run(run.stop_amid_streams())
        if "--speculative-config" in flags and not 0 < run.drafts["accepted"] < run.drafts["drafts"]:
            run.problems.append(f"drafts were not tried: {run.drafts}")
        grown = growth(samples)
        run.problems += [f"{name} grew by {share:.1%}" for name, share in grown.items() if share > MAX_GROWTH]
        result = {
            "requests": sum(run.outcomes.values()),
            "outcomes": dict(run.outcomes.most_common()),
            "drafts": run.drafts,
            "growth": {name: round(share, 4) for name, share in grown.items()},
            "first": samples[0]._asdict(),
            "last": samples[-1]._asdict(),
            "problems": dict(Counter(run.problems)),
        }
        if run.problems:
            print(server.log_tail(), file=sys.stderr)
    print(json.dumps(result))
    return run.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("flags", nargs="*", help="for quire serve, after --")
    args = parser.parse_args()
    problems = soak(args.seconds, args.clients, args.seed, args.model, args.flags)
    for problem, count in Counter(problems).most_common(20):
        print(f"{count} × {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
