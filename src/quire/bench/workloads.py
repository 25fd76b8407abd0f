"""The benchmark workloads and how they are timed: exact, so that every engine does the same work.

Called by `quire bench` and, by file path, by the drivers of other engines in `benchmarks/peers/`.
Standard library only; must not know Quire, or any engine.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LATENCY_WORKLOADS = ("stream-128", "stream-512", "stream-1024", "stream-8192")
THROUGHPUT_WORKLOADS = ("mixed64", "mixed256", "p1024d128")

# Drawn ids stay clear of the special tokens at the bottom of common vocabularies. Both bounds are inclusive.
TOKEN_ID_RANGE = {"cpu": (100, 40_000), "cuda": (10, 10_000)}
TEMPERATURE = {"cpu": 0.0, "cuda": 0.6}
NUM_DECODE_TOKENS = {"cpu": 128, "cuda": 256}

NUM_TTFT_RUNS = 3


@dataclass(frozen=True)
class Task:
    """One request: a prompt and how many tokens to generate, end-of-text tokens ignored."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Tasks that arrive at once, sampled at `temperature`, with prefix caching off."""

    name: str
    tasks: list[Task]
    temperature: float

    @property
    def is_latency(self) -> bool:
        return self.name in LATENCY_WORKLOADS

    @property
    def max_model_len(self) -> int:
        """The shortest context that holds every task."""
        return max(len(task.prompt_token_ids) + task.num_output_tokens for task in self.tasks)


# Runs tasks to their end as one batch; returns how many tokens came out.
Generate = Callable[[Sequence[Task]], int]


def build(name: str, device: str) -> Workload:
    """The workload `name` for `device`, "cpu" or "cuda"."""
    low, high = TOKEN_ID_RANGE[device]
    rng = random.Random(1 if name == "mixed64" else 0)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(num_tokens)]

    def mixed(num_tasks: int, prompt_lengths: tuple[int, int], output_lengths: tuple[int, int]) -> list[Task]:
        # The order of the draws is part of the definition: each prompt's length and then its ids, output lengths last.
        prompts = [prompt(rng.randint(*prompt_lengths)) for _ in range(num_tasks)]
        return [Task(token_ids, rng.randint(*output_lengths)) for token_ids in prompts]

    if name in LATENCY_WORKLOADS:
        tasks = [Task(prompt(int(name.removeprefix("stream-"))), NUM_DECODE_TOKENS[device] + 1)]
    elif name == "mixed64":
        tasks = mixed(64, (32, 256), (32, 128))
    elif name == "mixed256":
        tasks = mixed(256, (100, 1024), (100, 1024))
    elif name == "p1024d128":
        tasks = [Task(prompt(1024), 128) for _ in range(1000)]
    else:
        known = ", ".join(LATENCY_WORKLOADS + THROUGHPUT_WORKLOADS)
        raise ValueError(f"unknown workload {name!r}: choose one of {known}")
    return Workload(name, tasks, TEMPERATURE[device])


def measure(workload: Workload, generate: Generate) -> dict[str, float]:
    """Time `workload` after one warm-up request."""
    first = workload.tasks[0]
    _time_s(generate, [first])
    if workload.is_latency:
        return _measure_latency(first, generate)
    return _measure_throughput(workload.tasks, generate)


def _measure_latency(task: Task, generate: Generate) -> dict[str, float]:
    one_token = Task(task.prompt_token_ids, 1)
    ttft_s = min(_time_s(generate, [one_token]) for _ in range(NUM_TTFT_RUNS))
    total_s = _time_s(generate, [task])
    tpot_s = (total_s - ttft_s) / (task.num_output_tokens - 1)
    return {"ttft_ms": ttft_s * 1e3, "tpot_ms": tpot_s * 1e3, "decode_tok_s": 1 / tpot_s, "duration_s": total_s}


def _measure_throughput(tasks: Sequence[Task], generate: Generate) -> dict[str, float]:
    total_s = _time_s(generate, tasks)
    num_tokens = sum(task.num_output_tokens for task in tasks)
    return {"out_tok_s": num_tokens / total_s, "req_s": len(tasks) / total_s, "duration_s": total_s}


def _time_s(generate: Generate, tasks: Sequence[Task]) -> float:
    start = time.perf_counter()
    num_generated = generate(tasks)
    elapsed_s = time.perf_counter() - start
    num_asked = sum(task.num_output_tokens for task in tasks)
    if num_generated != num_asked:  # an engine that stops early must not look fast
        raise RuntimeError(f"{num_generated} tokens were generated where the workload asks for {num_asked}")
    return elapsed_s
