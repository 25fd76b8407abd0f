"""What sleeping gives back on a GPU, and how soon an engine is awake: `python benchmarks/sleep.py qwen3-8b`.

Models are named as in `gpu.py`. For each level it prints how much of the device's memory that the process held is free
while it sleeps, how long falling asleep and waking up take, and whether the tokens after are those before. The exit
status is 1 if under 90% are given back, if waking from level 1 takes more than 5 s, or if a token differs.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu import open_model  # noqa: E402
from quire import LLM, SamplingParams  # noqa: E402

LEAST_FREED, MOST_WAKING_S = 0.9, 5.0


def tokens(llm: LLM) -> list[list[int]]:
    source = random.Random(0)
    prompts = [source.choices(range(10, 10_000), k=100) for _ in range(8)]
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=64, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    args = parser.parse_args()
    is_right = True
    others = used_bytes()
    with open_model(args.model, 2048) as llm:
        expected = tokens(llm)
        for level in (1, 2):
            held = used_bytes() - others
            started = time.perf_counter()
            llm.sleep(level)
            asleep_s = time.perf_counter() - started
            freed = 1 - (used_bytes() - others) / held
            started = time.perf_counter()
            llm.wake_up()
            awake_s = time.perf_counter() - started
            is_same = tokens(llm) == expected
            print(
                f"{args.model}, level {level}: {freed:.1%} of {held / 2**30:.1f} GiB given back in {asleep_s:.2f} s, "
                f"awake in {awake_s:.2f} s, tokens {'as before' if is_same else 'DIFFER'}",
                flush=True,
            )
            is_right &= freed >= LEAST_FREED and is_same and (level == 2 or awake_s <= MOST_WAKING_S)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
