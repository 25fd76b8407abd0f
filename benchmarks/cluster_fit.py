"""This CPU as a machine of `cluster_model.py`, and whether its predictions for two processes hold: `--check` there.

Fitted are runs of one process with one thread, the sum of `ranks.py`, and how fast two processes read memory; no engine
with TP 2, PP 2 or DP 2 is used for it. Of every figure the fastest counts: whoever shares the machine only adds.
"""

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import cluster_model as model
import torch

from quire import LLM, AsyncLLM, RequestOutputKind
from quire.params import SamplingParams

SMOLLM2 = replace(model.shape("smollm2-135m"), weight_bytes=0.73)  # of Q4_1: 98 MB for 134.5 M weights
STEP_TOKENS = 2048
COMMON: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "enable_prefix_caching": False,
    "max_model_len": 1024,
    "max_num_batched_tokens": STEP_TOKENS,
    "kv_cache_memory_bytes": 1 << 28,
}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY_LAYERS = 2, 30
FIT_ROWS = 4, 8, 16  # of decode steps, beside one
FIT_PROMPTS = 128, 512
FIT_OUTPUT = 49
# What is predicted and measured.
LONE_PROMPT, LONE_OUTPUT = 256, 33
BATCH, BATCH_PROMPT, BATCH_OUTPUT = 16, 32, 48

Sample = Callable[[str, float], None]  # keeps the least of each name
Generate = Callable[[int, int, int], list[float]]  # requests, tokens in, out; seconds until each token of the first


def prompts(rows: int, length: int) -> list[list[int]]:
    rng = random.Random(time.perf_counter_ns())
    return [[rng.randint(100, 500) for _ in range(length)] for _ in range(rows)]


def params(output: int) -> SamplingParams:
    kind = RequestOutputKind.DELTA
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=kind)


def generator(llm: LLM) -> Generate:
    def generate(rows: int, length: int, output: int) -> list[float]:
        drawn, start_s = prompts(rows, length), time.perf_counter()
        if rows == 1:
            return [time.perf_counter() - start_s for _ in llm.stream(drawn[0], params(output))]
        llm.generate(drawn, params(output), use_tqdm=False)
        return [time.perf_counter() - start_s]

    return generate


def async_generator(llm: AsyncLLM, runner: asyncio.Runner) -> Generate:
    async def one(prompt: list[int], output: int, start_s: float) -> list[float]:
        return [time.perf_counter() - start_s async for _ in llm.generate(prompt, params(output))]

    async def all_of(rows: int, length: int, output: int) -> list[float]:
        drawn, start_s = prompts(rows, length), time.perf_counter()
        times = await asyncio.gather(*(one(prompt, output, start_s) for prompt in drawn))
        return times[0] if rows == 1 else [max(each[-1] for each in times)]

    return lambda *what: runner.run(all_of(*what))


def fast(times: list[float]) -> float:
    """Of the steps after the first: the fastest tenth, as in `ranks.py`."""
    gaps = sorted(late - early for early, late in zip(times, times[1:]))
    return gaps[len(gaps) // 10]


def fit_round(generate: Generate, sample: Sample) -> None:
    for length in FIT_PROMPTS:
        sample(f"prompt {length}", generate(1, length, 1)[0])
    sample("rows 1", fast(generate(1, 64, FIT_OUTPUT)))
    for rows in FIT_ROWS:
        sample(f"rows {rows} first", generate(rows, 16, 1)[-1])
        sample(f"rows {rows} all", generate(rows, 16, FIT_OUTPUT)[-1])


@contextmanager
def tiny(layers: int, **options: Any) -> Iterator[LLM]:
    """An engine whose steps are all overhead."""
    config = json.loads((model.SHAPES / "smollm2-135m" / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config | TINY | {"num_hidden_layers": layers}))
        changed = COMMON | {"load_format": "dummy", "skip_tokenizer_init": True} | options
        with LLM(folder, **changed) as llm:
            yield llm


def _read(barrier: Any, seconds: Any) -> None:
    torch.set_num_threads(1)
    data = torch.ones(1 << 25)  # 128 MiB
    best = inf
    for _ in range(20):
        barrier.wait()
        start_s = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start_s)
    seconds.put(best)


def read_bytes_s() -> float:
    """What two processes read together."""
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=_read, args=(barrier, seconds)) for _ in range(2)]
    for process in processes:
        process.start()
    both = [seconds.get() for _ in processes]
    for process in processes:
        process.join()
    return sum((1 << 27) / each for each in both)


def sums() -> tuple[float, float]:
    """Seconds of a sum of one row over two ranks, and bytes per second of long ones."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), "--pin", "--width", str(SMOLLM2.hidden)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    replayed = {int(words[0]): float(words[2]) * 1e-6 for line in lines if (words := line.split())[0].isdigit()}
    replayed = {rows: us for rows, us in replayed.items() if rows != 2}  # the heading begins with the ranks
    long = 512
    return replayed[1], long * SMOLLM2.hidden * 2 / max(replayed[long] - replayed[1], 1e-6)


def fitted(least: dict[str, float]) -> model.Machine:
    few, many = TINY_LAYERS
    layer_s = max(least[f"tiny {many}"] - least[f"tiny {few}"], 0) / (many - few)
    host_s = least[f"tiny {few}"] - few * layer_s
    fixed_s = host_s + SMOLLM2.layers * layer_s
    s = SMOLLM2
    head, layers = s.vocab * s.hidden, s.layers * (s.attention_weights + s.expert_weights)
    table = {1: (least["rows 1"] - fixed_s) / (layers + head)}
    for rows in FIT_ROWS:
        step_s = (least[f"rows {rows} all"] - least[f"rows {rows} first"]) / (FIT_OUTPUT - 1)
        table[rows] = (step_s - fixed_s) / (layers + head)
    for rows in FIT_PROMPTS:
        table[rows] = (least[f"prompt {rows}"] - fixed_s - head * table[1]) / layers
    weight_s = [(rows, max(table[fewer] for fewer in table if fewer <= rows)) for rows in sorted(table)]
    return model.Machine(
        weight_s=tuple(weight_s),  # more rows never take less
        attention_flop_s=1e18,  # short contexts: part of the products here
        attention_half=0,
        memory_s=1e18,  # so are norms
        layer_s=layer_s,
        expert_layer_s=layer_s,
        whole_passes=0,
        divided_passes=0,
        expert_passes=0,
        sum_s=least["sum"],
        link_s=1 / least["s per byte of sums"],
        hop_s=least["sum"],
        hop_bytes_s=1 / least["s per byte of sums"],
        message_s=max(least["tiny mp"] - least[f"tiny {few}"], 0),
        host_step_s=host_s,
        host_row_s=0.0,  # part of the products
        prompt_step_s=0.0,
        hides_host=False,
        step_tokens=STEP_TOKENS,
        shared_memory_s=1 / least["s per byte read"],
    )


@dataclass(frozen=True)
class Side:
    name: str
    options: dict[str, int]
    layout: model.Layout


SIDES = (
    Side("TP 2", {"tensor_parallel_size": 2}, model.Layout(tp=2)),
    Side("PP 2", {"pipeline_parallel_size": 2}, model.Layout(pp=2)),
    Side("DP 2", {"data_parallel_size": 2}, model.Layout(dp=2)),
)


def predicted(machine: model.Machine, layout: model.Layout) -> model.Figures:
    """A lone request leaves the second engine idle; many are halved."""
    alone = model.lone(machine, SMOLLM2, replace(layout, dp=1), LONE_PROMPT, LONE_OUTPUT)
    requests = [model.Request(BATCH_PROMPT, BATCH_OUTPUT) for _ in range(BATCH // layout.dp)]
    return replace(alone, tokens_s=BATCH * BATCH_OUTPUT / model.run(machine, SMOLLM2, layout, requests))


def check(rounds: int) -> int:
    least: dict[str, float] = defaultdict(lambda: inf)
    print(f"load before: {os.getloadavg()[0]:.1f}; only an idle machine's figures count", file=sys.stderr)

    def sample(name: str, value: float) -> None:
        least[name] = min(least[name], value)

    for _ in range(2):
        sum_s, link_s = sums()
        sample("sum", sum_s)
        sample("s per byte of sums", 1 / link_s)
        sample("s per byte read", 1 / read_bytes_s())
    for name, layers, options in (
        *((f"tiny {layers}", layers, {}) for layers in TINY_LAYERS),
        *((f"tiny {backend}", TINY_LAYERS[0], {"distributed_executor_backend": backend}) for backend in ("mp", "ray")),
    ):
        with tiny(layers, **options) as llm:
            for _ in range(10):
                sample(name, fast(generator(llm)(1, 16, 65)))
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        generators = {"one": generator(stack.enter_context(LLM("smollm2", **COMMON)))}
        for side in SIDES:
            if side.layout.dp > 1:
                engines = AsyncLLM("smollm2", **COMMON, **side.options)
                stack.callback(engines.shutdown)
                generators[side.name] = async_generator(engines, runner)
            else:
                generators[side.name] = generator(stack.enter_context(LLM("smollm2", **COMMON, **side.options)))
        for generate in generators.values():  # records tapes
            generate(BATCH, BATCH_PROMPT, 4)
            generate(1, LONE_PROMPT, 4)
        for round_idx in range(rounds):
            print(f"round {round_idx + 1} of {rounds}", file=sys.stderr, flush=True)
            fit_round(generators["one"], sample)
            for side in SIDES:
                generate = generators[side.name]
                lone = generate(1, LONE_PROMPT, LONE_OUTPUT)
                sample(f"{side.name} TTFT", lone[0])
                # An engine in another process may be read late, and the next token then comes early.
                is_far = side.layout.dp > 1
                sample(f"{side.name} TPOT", (lone[-1] - lone[0]) / (LONE_OUTPUT - 1) if is_far else fast(lone))
                sample(f"{side.name} batch", generate(BATCH, BATCH_PROMPT, BATCH_OUTPUT)[-1])
    return judge(least)


def judge(least: dict[str, float]) -> int:
    machine = fitted(least)
    few = least[f"tiny {TINY_LAYERS[0]}"]
    for backend in ("mp", "ray"):
        print(f"a message to a worker and back, {backend}: {(least[f'tiny {backend}'] - few) * 1e3:.2f} ms")
    print("fitted:", {name: f"{value * 1e3:.4g} ms" for name, value in least.items() if "P 2" not in name})
    print(machine)
    worst = 0.0
    print("| | figure | predicted | measured | ratio |\n| --- | --- | --- | --- | --- |")
    for side in SIDES:
        expected = predicted(machine, side.layout)
        rows = (
            ("TTFT, ms", expected.ttft_s * 1e3, least[f"{side.name} TTFT"] * 1e3),
            ("TPOT, ms", expected.tpot_s * 1e3, least[f"{side.name} TPOT"] * 1e3),
            (f"{BATCH} requests, tok/s", expected.tokens_s, BATCH * BATCH_OUTPUT / least[f"{side.name} batch"]),
        )
        for name, ours, measured in rows:
            print(f"| {side.name} | {name} | {ours:.2f} | {measured:.2f} | {ours / measured:.2f} |")
            worst = max(worst, abs(ours / measured - 1))
    print(f"the worst is off by {worst:.0%}; {model.OFF_LIMIT:.0%} are allowed")
    return int(worst > model.OFF_LIMIT)
