"""Whether a busy server answers what the engine answers alone: 256 streaming clients, 2,000 requests, against `LLM`.

    python benchmarks/serving_exact.py [--requests 2000] [--clients 256] [--input-len 32] [--output-len 16]

In float32, where a request's logits do not depend on the others in its batch. Exit status 1 when a request failed or
its text differs.
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import msgspec

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.server_process import QUIRE, ServerProcess  # noqa: E402
from quire import LLM, SamplingParams  # noqa: E402
from quire.bench.http_client import Failure, HttpClient, StreamedReply  # noqa: E402

ENGINE = {"dtype": "float32", "max_model_len": 512}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("requests", 2000), ("clients", 256), ("input-len", 32), ("output-len", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(args.input_len)]

    prompts = [prompt() for _ in range(args.requests)]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    with ServerProcess([*QUIRE, "smollm2", *flags], "/ready") as server:
        started = time.monotonic()
        texts, errors = asyncio.run(ask(server, prompts, args))
        duration_s = time.monotonic() - started
        exit_code = server.stop()
    with LLM("smollm2", **ENGINE) as llm:
        params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        truth = [output.outputs[0].text for output in llm.generate(prompts, params)]
    differing = sum(text != expected for text, expected in zip(texts, truth))
    result = f"{len(errors)} errors, {differing} texts differ, exit {exit_code}"
    print(f"{args.requests} requests, {args.clients} clients, {duration_s:.1f} s: {result}")
    for error in errors[:5]:
        print(" ", error)
    return 1 if any((errors, differing, exit_code)) else 0


async def ask(server: ServerProcess, prompts: list[list[int]], args: argparse.Namespace) -> tuple[list[str], list[str]]:
    texts = [""] * len(prompts)
    errors: list[str] = []
    options = {"max_tokens": args.output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    todo = iter(range(len(prompts)))

    async def work(client: HttpClient) -> None:
        for idx in todo:
            body = {"prompt": prompts[idx], **options}
            answer = StreamedReply()
            try:
                await client.post("/v1/completions", msgspec.json.encode(body), answer)
                answer.check()
            except Failure as failure:
                errors.append(f"{failure.kind}: {failure}")
            texts[idx] = "".join(answer.texts)

    async with HttpClient(server.url) as client:
        await asyncio.gather(*(work(client) for _ in range(args.clients)))
    return texts, errors


if __name__ == "__main__":
    sys.exit(main())
