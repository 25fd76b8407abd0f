"""What a token costs a server beside the model: CPU time per token of the API process and of the engine core.

    python benchmarks/serving_cost.py [--streams 256] [--tokens 800] [--steps-per-s 50] [--endpoint messages] [--json]

An echo model takes one paced step for all streams; each stream gets its token as an event of its own, detokenized. For
comparison, a bare ASGI loop on uvicorn writes the same bytes to as many clients at the same pace. Exit status 1 when a
cost is above its limit (BARS_US).
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.server_process import QUIRE, ServerProcess, cpu_s  # noqa: E402
from quire.bench.http_client import HttpClient, HttpReply  # noqa: E402
from quire.bench.loadgen import PATHS, Load, measure, prepared  # noqa: E402

BARS_US = {"api": 35.0, "core": 10.0}
PROMPT_TOKENS = 32
TEMPLATE = "{{ messages[-1].content }}"  # without special tokens: an echo of them would end answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=800, help="per stream: together at least 200,000 for a figure that counts"
    )
    parser.add_argument("--steps-per-s", type=int, default=50)
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        serve_bare(args.port, json.load(sys.stdin))
        return 0
    return report(args, *run_quire(args))


def report(args: argparse.Namespace, quire: dict[str, Any], sample: list[str]) -> int:
    bare = run_bare(args, sample)
    num_tokens = quire["num_output_tokens"]
    result = {
        "tokens": num_tokens,
        "events_per_token": round(quire["num_events"] / num_tokens, 4),
        "errors": quire["errors"] | bare["errors"],
        "api_us": round(quire["cpu_s"]["api"] / num_tokens * 1e6, 1),
        "api_us_per_event": round(quire["cpu_s"]["api"] / quire["num_events"] * 1e6, 1),
        "core_us": round(quire["cpu_s"]["core"] / num_tokens * 1e6, 1),
        "bare_asgi_us": round(bare["cpu_s"]["api"] / bare["num_output_tokens"] * 1e6, 1),
        "client_us": round(quire["client_cpu_s"] / num_tokens * 1e6, 1),
        "itl_ms": {name: round(value, 2) for name, value in quire["itl_ms"].items()},
        "bare_itl_ms": {name: round(value, 2) for name, value in bare["itl_ms"].items()},
        "event_bytes": len(sample[0]),
    }
    if not args.json:
        print(f"{args.streams} streams at {args.steps_per_s} steps per second, {num_tokens:,} tokens:")
        print(f"  API process   {result['api_us']:5.1f} µs of CPU per token, at most {BARS_US['api']:.0f} wanted")
        print(f"  core process  {result['core_us']:5.1f} µs, at most {BARS_US['core']:.0f} wanted")
        print(f"  bare ASGI     {result['bare_asgi_us']:5.1f} µs for the same {result['event_bytes']} bytes")
        print(f"  events per token {result['events_per_token']}")
        print(f"  time between tokens {result['itl_ms']} ms (bare: {result['bare_itl_ms']})")
        if result["events_per_token"] < 0.99:
            print("  the machine was too busy for an event per token")
            print(f"  API process   {result['api_us_per_event']:5.1f} µs per event")
    print(json.dumps(result))
    # A reader that falls behind gets several tokens in one event, which costs less: so the limit is for an event.
    is_slow = result["api_us_per_event"] > BARS_US["api"] or result["core_us"] > BARS_US["core"]
    has_failed = bool(result["errors"]) or num_tokens != args.streams * args.tokens
    return 1 if is_slow or has_failed else 0


def run_quire(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The figures, and the events of one answer."""
    longest = PROMPT_TOKENS + 100 + args.tokens
    flags = f"--executor echo:{args.steps_per_s} --max-num-seqs {args.streams} --max-model-len {longest}"
    command = [*QUIRE, args.model, *flags.split(), "--no-access-log", "--no-enable-prefix-caching"]
    command += ["--chat-template", TEMPLATE]
    with ServerProcess(command, "/ready") as server:
        sample = asyncio.run(one_answer(load_for(args, server.url)))
        return run_load(args, server.url, {"api": server.pid, "core": server.core_pid}), sample


def run_bare(args: argparse.Namespace, sample: list[str]) -> dict[str, Any]:
    plan = {"event": sample[0], "streams": args.streams, "tokens": args.tokens, "steps_per_s": args.steps_per_s}
    command = [sys.executable, str(Path(__file__).resolve()), "--bare"]
    with ServerProcess(command, "/v1/models", json.dumps(plan).encode()) as server:
        return run_load(args, server.url, {"api": server.pid})


def run_load(args: argparse.Namespace, url: str, pids: dict[str, int]) -> dict[str, Any]:
    """The load generator's figures and the CPU time each process spent meanwhile."""
    load = load_for(args, url)
    asyncio.run(measure(load_for(args, url, num_tokens=16)))  # warms up
    before: dict[str, float] = {}

    def progress(num_done: int) -> None:
        if not before:
            before.update({name: cpu_s(pid) for name, pid in pids.items()})

    result = asyncio.run(measure(load, args.client_processes, progress))
    return result | {"cpu_s": {name: cpu_s(pid) - before[name] for name, pid in pids.items()}}


def load_for(args: argparse.Namespace, url: str, num_tokens: int | None = None) -> Load:
    return Load(
        base_url=url,
        model="",
        num_prompts=args.streams,
        input_len=PROMPT_TOKENS,
        output_len=num_tokens or args.tokens,
        concurrency=args.streams,
        endpoint=args.endpoint,
        ignore_eos=True,
    )


async def one_answer(load: Load) -> list[str]:
    """The events of a short answer as the server writes them, an ordinary one first."""
    async with HttpClient(load.base_url) as client:
        load = await prepared(client, load)
        reply = await client.post(PATHS[load.endpoint], load.body(0, max_tokens=8), HttpReply())
    events = [event + "\n\n" for event in reply.content.decode().split("\n\n") if event]
    return sorted(events, key=len)[len(events) // 2 :]


def serve_bare(port: int, plan: dict[str, Any]) -> None:
    """The least a Python server can do for such streams: one clock, and one write per tick and stream."""
    import uvicorn

    event = plan["event"].encode()
    step_s = 1 / plan["steps_per_s"]
    waiting: list[asyncio.Future] = []

    async def clock() -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            due, waiting[:] = waiting[:], []
            for waiter in due:
                waiter.set_result(None)

    clocks: list[asyncio.Task] = []

    async def app(scope, receive, send) -> None:
        body, more = b"", True
        while more and scope["method"] == "POST":
            message = await receive()
            body, more = body + message["body"], message.get("more_body")
        is_stream = scope["path"] in PATHS.values()
        status = 200 if is_stream or scope["path"] == "/v1/models" else 404
        headers = [(b"content-type", b"text/event-stream" if is_stream else b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if not is_stream:
            await send({"type": "http.response.body", "body": b'{"data":[{"id":"bare"}]}'})
            return
        if not clocks:
            clocks.append(asyncio.create_task(clock()))
        num_tokens = json.loads(body)["max_tokens"]
        for _ in range(num_tokens):
            waiting.append(asyncio.get_running_loop().create_future())
            await waiting[-1]
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if scope["path"] == PATHS["messages"]:
            usage: dict[str, Any] = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": num_tokens}}
            end = json.dumps({"type": "message_stop"})
        else:
            usage = {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": num_tokens}}
            end = "[DONE]"
        await send({"type": "http.response.body", "body": f"data: {json.dumps(usage)}\n\ndata: {end}\n\n".encode()})

    uvicorn.run(app, port=port, log_level="error", access_log=False, lifespan="off", loop="uvloop", http="httptools")


if __name__ == "__main__":
    sys.exit(main())
