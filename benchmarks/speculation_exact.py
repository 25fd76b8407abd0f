"""Checks that speculative decoding changes no token: `python benchmarks/speculation_exact.py [--prompts 64]`.

In float32, with real weights: prompts with passages to be repeated, half of them greedy, half seeded at temperature 0.8
with penalties; every prompt twice, so that the second finds a prefix; at pipeline depths 1 and 2; once with so few KV
blocks that requests are preempted. Drafts are verified however many requests run. Printed are the tokens that differ
from those without speculation, and how many drafts were accepted at each place. The exit status is 1 if a token
differs, or if under 20% or over 95% of the drafts were accepted: then nothing was shown.
"""

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from quire import LLM, SamplingParams  # noqa: E402

NUM_DRAFTS = 4
SPECULATIONS = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFTS,
        "prompt_lookup_min": 2,
        "num_speculative_tokens_per_batch_size": [[1, 1000, NUM_DRAFTS]],
    },
}
CASES = {
    "depth 1": {"pipeline_depth": 1},
    "depth 2": {"pipeline_depth": 2},
    "preemption": {"pipeline_depth": 2, "num_gpu_blocks_override": 160},
}


def prompts_of(llm: LLM, num_prompts: int) -> list[list[int]]:
    """Passages of this project's own texts, to be repeated; each prompt is there twice."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode((ROOT / "README.md").read_text())
    before, after = tokenizer.encode("Repeat this exactly.\n\n"), tokenizer.encode("\n\nThe same again:\n\n")
    source = random.Random(0)
    found = []
    for _ in range(num_prompts // 2):
        start = source.randrange(len(ids) - 200)
        found.append(before + ids[start : start + source.randrange(60, 160)] + after)
    return found * 2


def params_of(num_prompts: int, num_tokens: int) -> list[SamplingParams]:
    common = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
    greedy = SamplingParams(temperature=0, **common)
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.05, "repetition_penalty": 1.02}
    seeded = [SamplingParams(temperature=0.8, seed=i, **penalties, **common) for i in range(num_prompts)]
    return [greedy if i % 2 else seeded[i] for i in range(num_prompts)]


def run(args: argparse.Namespace, **options):
    """(token ids of every request, logprobs of these, the engine's counts)."""
    common = {"dtype": "float32", "quantization": "none", "max_num_seqs": args.seqs, "max_model_len": 1024}
    with LLM(args.model, **common, device=args.device, **options) as llm:
        prompts = prompts_of(llm, args.prompts)
        params = params_of(len(prompts), args.tokens)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.client.engine.stats()
    tokens = [list(output.token_ids) for output in outputs]
    logprobs = [[entry[token].logprob for entry, token in zip(o.logprobs, o.token_ids)] for o in outputs]
    return tokens, logprobs, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seqs", type=int, default=16, help="requests that run at once")
    parser.add_argument("--methods", nargs="+", default=list(SPECULATIONS), choices=SPECULATIONS)
    args = parser.parse_args()
    started = time.monotonic()
    expected, expected_logprobs, _ = run(args)
    print(f"without: {time.monotonic() - started:.0f} s", flush=True)
    is_right = True
    for method in args.methods:
        for case, options in CASES.items():
            started = time.monotonic()
            found, logprobs, stats = run(args, speculative_config=SPECULATIONS[method], **options)
            pairs = zip(expected, found)
            differing = sum(a != b for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True))
            largest = max(abs(a - b) for x, y in zip(expected_logprobs, logprobs) for a, b in zip(x, y))
            accepted = sum(stats.accepted_drafts)
            share = accepted / max(1, stats.num_draft_tokens)
            print(
                f"{method}, {case}: {differing} of {sum(map(len, expected)):,} tokens differ, "
                f"logprobs by {largest:.1e}; {share:.0%} of {stats.num_draft_tokens:,} drafts accepted, "
                f"by place {stats.accepted_drafts} of {stats.num_drafts:,}; {stats.num_preemptions} preemptions, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
            is_right &= not differing and 0.2 <= share <= 0.95
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
