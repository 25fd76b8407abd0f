"""The same request gives the same tokens: alone, batched, in chunks, preempted, on a prefix hit, at any pipeline depth.

    python benchmarks/invariance.py [--prompts 32] [--tokens 64]

The default model in float32, every prompt greedy and at temperature 0.8 with a seed. Prints a line per condition; exits
with 1 when a token differs. `tests/test_invariance.py` runs a part of it.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from tests.prompts import PROMPTS  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402

MAX_LEN = 128

# condition -> engine options
CONDITIONS = {
    "batch of 64": {},
    "alone": {"max_num_seqs": 1},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "chunks of 512": {"max_num_batched_tokens": 512},
    "pipeline depth 2": {"pipeline_depth": 2},
    "depth 2, chunks of 7": {"pipeline_depth": 2, "max_num_batched_tokens": 7, "max_num_seqs": 7},
    "plain torch attention": {"attention_backend": "reference"},
}


class Check:
    def __init__(self, num_prompts: int, num_tokens: int) -> None:
        self.prompts = PROMPTS[:num_prompts] * 2
        self.num_tokens = num_tokens
        self.expected: list[list[int]] | None = None
        self.prompt_ids: list[list[int]] = []

    def params(self, num_tokens: int) -> list[SamplingParams]:
        half = len(self.prompts) // 2
        common = {"max_tokens": num_tokens, "ignore_eos": True}
        greedy = [SamplingParams(temperature=0, **common)] * half
        sampled = [SamplingParams(temperature=0.8, seed=seed, **common) for seed in range(half)]
        return greedy + sampled

    def run(self, options: dict) -> tuple[int, "LLM"]:
        """(requests that differ from the first condition's, the engine)"""
        all_options = {"enable_prefix_caching": False, "max_num_seqs": 64, **options}
        llm = LLM("smollm2", dtype="float32", max_model_len=MAX_LEN, **all_options)
        outputs = llm.generate(self.prompts, self.params(self.num_tokens), use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in outputs]
        if self.expected is None:
            self.expected = answers
            self.prompt_ids = [output.prompt_token_ids for output in outputs]
        return sum(answer != expected for answer, expected in zip(answers, self.expected)), llm

    def preempted(self, options: dict) -> tuple[int, int]:
        """(requests that differ, preemptions) with room for about a third of the requests."""
        blocks = 2 + max(MAX_LEN // 16, len(self.prompts) * (self.num_tokens + 20) // 16 // 3)
        differing, llm = self.run({"num_gpu_blocks_override": blocks, **options})
        preemptions = llm.client.engine.stats().num_preemptions
        llm.close()
        return differing, preemptions

    def prefix_hits(self) -> tuple[int, int]:
        """(requests that differ, tokens found): each goes on from the middle of its own answer, found in the cache."""
        differing, llm = self.run({"enable_prefix_caching": True})
        half = self.num_tokens // 2
        prompts = [prompt + answer[:half] for prompt, answer in zip(self.prompt_ids, self.expected)]
        outputs = llm.generate(prompts, self.params(self.num_tokens - half), use_tqdm=False)
        for output, answer in zip(outputs, self.expected):
            differing += output.outputs[0].token_ids != answer[half:]
        llm.close()
        return differing, sum(output.num_cached_tokens for output in outputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    check = Check(args.prompts, args.tokens)
    failures = 0

    def report(condition: str, differing: int, note: str = "") -> None:
        nonlocal failures, started
        failures += differing
        seconds = time.monotonic() - started
        print(f"{condition:<28} {differing} of {len(check.prompts)} differ  {seconds:6.1f} s  {note}", flush=True)
        started = time.monotonic()

    started = time.monotonic()
    for condition, options in CONDITIONS.items():
        differing, llm = check.run(options)
        llm.close()
        report(condition, differing)
    for depth in (1, 2):
        differing, preemptions = check.preempted({"pipeline_depth": depth})
        report(f"preempted, depth {depth}", differing, f"{preemptions} preemptions")
        failures += preemptions == 0
    differing, cached = check.prefix_hits()
    report("prefix hits", differing, f"{cached} tokens found")
    failures += cached == 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
