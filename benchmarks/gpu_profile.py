"""Where the time of a step goes on a GPU: `python benchmarks/gpu_profile.py MODEL [--rows 256] [--context 500]`.

Models are named as in `gpu.py`. Two runs with the same prompts, one of which generates more tokens, are recorded by
torch's profiler; what the longer one takes more, divided by the number of its additional steps, is printed kernel by
kernel. The first line has the time that passes, and the time of all kernels. With `--prompts` it is the time of the
prompts, and of one token each, instead. Kernels that start before the one ahead has ended count their waiting, too.
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu import open_model  # noqa: E402
from quire import LLM, SamplingParams  # noqa: E402

SHORT, LONG = 8, 40  # tokens that the two runs generate


def timed(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    if not num_tokens:
        return 0.0
    params = SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def recorded(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[Counter[str], Counter[str]]:
    """(microseconds, launches) of each kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(llm, prompts, num_tokens)
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events():
        times[event.name] += event.device_time
        launches[event.name] += 1
    return times, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--prompts", action="store_true", help="instead of decode steps")
    parser.add_argument("--top", type=int, default=20, help="kernels that are printed")
    args = parser.parse_args()
    source = random.Random(0)
    prompts = [source.choices(range(10, 10_000), k=args.context) for _ in range(args.rows)]
    with open_model(args.model, args.context + LONG + 8) as llm:
        timed(llm, prompts, LONG)  # records graphs, compiles kernels
        counts, num_steps, unit = ((LONG, SHORT), LONG - SHORT, "a step") if not args.prompts else ((1, 0), 1, "in all")
        step_ms = (timed(llm, prompts, counts[0]) - timed(llm, prompts, counts[1])) / num_steps * 1e3
        (long, long_launches), (short, short_launches) = (recorded(llm, prompts, count) for count in counts)
    per_step = {name: (long[name] - short[name]) / num_steps for name in long}
    total = sum(per_step.values())
    print(f"{args.model}, {args.rows} rows, context {args.context}: {step_ms:.2f} ms {unit}, kernels {total / 1e3:.2f}")
    for name in sorted(per_step, key=lambda name: -per_step[name])[: args.top]:
        count = (long_launches[name] - short_launches[name]) / num_steps
        print(f"{per_step[name]:9.0f} us {per_step[name] / total:6.1%} {count:7.1f} times  {name[:90]}")


if __name__ == "__main__":
    main()
