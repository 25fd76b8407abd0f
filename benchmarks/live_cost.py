"""What those who watch the engine cost: CPU time per update of the engine core and of the API process.

    python -m benchmarks.live_cost [--running 64] [--blocks 100000] [--watchers 8] [--rounds 4] [--json]

An echo model keeps all requests running, and most blocks of its cache are owned or cached. Rounds take turns: without
watchers, with watchers and an empty prefix tree, with watchers and a full one (prompts that begin alike are sent before
the round). CPU time is read each second, and of all these seconds of a kind of rounds the lower quartile counts: others
were disturbed. How much more it is than without watchers, divided by the updates in a second, is what an update costs.
Exit status 1 when that is above its limit (BARS_MS) with either tree, or an update is too long.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import QUIRE, ServerProcess

BARS_MS = {"core": 1.0, "api": 2.0}
MAX_BYTES = 32 << 10
STEPS_PER_S = 20
PROMPT_TOKENS, MAX_MODEL_LEN = 4096, 8192
NUM_CACHED = 160  # prompts that are computed first, and stay in the cache
# What fills the tree: so many beginnings, each of so many tokens, with so many ends of their own.
BEGINNINGS, BEGINNING_TOKENS, ENDS, END_TOKENS = 20, 1024, 12, 128
MAX_NODES = 200  # of the tree, by docs/live.md
SETTLE_S = 3.0  # before a round is measured
ALONE, EMPTY, FULL = "alone", "empty", "full"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--watchers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="of each kind")
    parser.add_argument("--round-s", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    args = parser.parse_args()
    command = [
        *QUIRE, "smollm2", "--executor", f"echo:{STEPS_PER_S}", "--num-gpu-blocks-override", str(args.blocks + 1),
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "262144", "--max-num-seqs", "256",
        "--no-access-log",
    ]  # fmt: skip
    with ServerProcess(command, "/ready") as server:
        result = asyncio.run(measured(server, args))
    return report(args, result)


def report(args: argparse.Namespace, result: dict[str, Any]) -> int:
    if not args.json:
        print(f"{args.running} running, {args.blocks:,} blocks, {args.watchers} watchers:")
        for kind in (EMPTY, FULL):
            print(f"  with {result[kind]['nodes']} nodes in the prefix tree")
            for name, bar in BARS_MS.items():
                print(f"    {name:4} {result[kind][name + '_ms']:6.3f} ms of CPU per update, at most {bar:g} wanted")
        print(f"  {result['updates_per_s']:.2f} updates per second, the longest of {result['max_bytes']:,} bytes")
    print(json.dumps(result))
    is_slow = any(result[kind][name + "_ms"] > bar for kind in (EMPTY, FULL) for name, bar in BARS_MS.items())
    return 1 if is_slow or result["max_bytes"] > MAX_BYTES else 0


async def measured(server: ServerProcess, args: argparse.Namespace) -> dict[str, Any]:
    pids = {"core": server.core_pid, "api": server.pid}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        rng = random.Random(0)
        await asyncio.gather(*(complete(client, tokens(rng, PROMPT_TOKENS), 1) for _ in range(NUM_CACHED)))
        running = [
            asyncio.create_task(complete(client, tokens(rng, PROMPT_TOKENS), MAX_MODEL_LEN - PROMPT_TOKENS))
            for _ in range(args.running)
        ]
        await asyncio.sleep(SETTLE_S)
        rounds: dict[str, list[Round]] = {ALONE: [], EMPTY: [], FULL: []}
        for _ in range(args.rounds):
            for kind, done in rounds.items():
                done.append(await one_round(client, kind, pids, args))
        if any(task.done() for task in running):
            raise SystemExit("requests ended before the end of the measurement: give fewer rounds")
        for task in running:
            task.cancel()
    return summary(rounds)


@dataclass
class Round:
    seconds: list[dict[str, float]] = field(default_factory=list)  # CPU time of each process, in each second
    updates_per_s: float = 0.0
    sizes: list[int] = field(default_factory=list)  # of updates, in bytes
    last: dict[str, Any] = field(default_factory=dict)  # the last update


async def one_round(client: httpx.AsyncClient, kind: str, pids: dict[str, int], args: argparse.Namespace) -> Round:
    done = Round()
    num_watchers = 0 if kind == ALONE else args.watchers
    watching = [asyncio.create_task(watch(client, done)) for _ in range(num_watchers)]
    await asyncio.sleep(SETTLE_S)
    if kind == FULL:
        await fill_tree(client)
        await asyncio.sleep(SETTLE_S)
    num_before = len(done.sizes)
    started = time.monotonic()
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    for second in range(1, args.round_s + 1):
        await asyncio.sleep(max(0.0, started + second - time.monotonic()))
        now = {name: cpu_s(pid) for name, pid in pids.items()}
        done.seconds.append({name: now[name] - before[name] for name in pids})
        before = now
    done.updates_per_s = (len(done.sizes) - num_before) / max(1, num_watchers) / (time.monotonic() - started)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await asyncio.sleep(SETTLE_S if watching else 0)
    return done


def summary(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    watched = rounds[EMPTY] + rounds[FULL]
    core = watched[-1].last["core"]
    (pool,) = core["kv"]["pools"]
    result: dict[str, Any] = {
        "max_bytes": max(size for done in watched for size in done.sizes),
        "updates_per_s": round(statistics.mean(done.updates_per_s for done in watched), 2),
        "counts": core["counts"],
        "blocks": {name: pool[name] for name in ("free", "cached", "owned")},
    }
    costs = {kind: undisturbed(done) for kind, done in rounds.items()}
    for kind in (EMPTY, FULL):
        nodes = rounds[kind][-1].last["core"]["prefix"]["nodes"]
        result[kind] = {"nodes": len(nodes), "hit_tokens": sum(node[5] for node in nodes)}
        for name in BARS_MS:
            gained_s = costs[kind][name] - costs[ALONE][name]
            result[kind][f"{name}_ms"] = round(gained_s / result["updates_per_s"] * 1000, 3)
    for name in BARS_MS:
        result[f"{name}_unwatched_ms_per_s"] = round(costs[ALONE][name] * 1000, 1)
    if result[FULL]["nodes"] < MAX_NODES or not result[FULL]["hit_tokens"]:
        raise SystemExit(f"the prefix tree was to be full, and has {result[FULL]['nodes']} nodes")
    return result


def undisturbed(rounds: list[Round]) -> dict[str, float]:
    """CPU time of each process in a second in which little else disturbed it."""
    seconds = [second for done in rounds for second in done.seconds]
    return {name: statistics.quantiles([second[name] for second in seconds])[0] for name in BARS_MS}


async def fill_tree(client: httpx.AsyncClient) -> None:
    """Prompts that begin alike: the first of each beginning is computed, the others find it in the cache."""
    rng = random.Random(1)
    beginnings = [tokens(rng, BEGINNING_TOKENS) for _ in range(BEGINNINGS)]
    prompts = [[beginning + tokens(rng, END_TOKENS) for _ in range(ENDS)] for beginning in beginnings]
    for nth in zip(*prompts):
        await asyncio.gather(*(complete(client, prompt, 1) for prompt in nth))


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(100, 40_000) for _ in range(count)]


async def complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def watch(client: httpx.AsyncClient, done: Round) -> None:
    async with client.stream("GET", "/v1/engine/live") as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                done.sizes.append(len(line) - 6)
                done.last = json.loads(line[6:])


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, exact to the microsecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
