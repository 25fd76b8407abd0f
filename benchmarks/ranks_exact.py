"""Every model file and variant, divided over processes in every layout: `python benchmarks/ranks_exact.py [NAME …]`.

In float32, with random weights: prompts of several lengths, computed in chunks, one of which finds a prefix; 64 tokens
must be those of one process, and logprobs within 1e-4. With `--options` also with an 8-bit cache, few blocks, seeds and
guessed tokens. Ranks add up in another order than one process, so a value on the border between two codes of an 8-bit
cache may fall to the other side: there logprobs may differ by ten times as much. The exit status is 1 if anything
differs. `tests/layouts` has one case per model file of this.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.layouts.executor import end_all  # noqa: E402
from tests.layouts.test_models import GREEDY, LAYOUTS, OPTIONS, prompts, refusal  # noqa: E402
from tests.models.oracle import TOLERANCE, all_cases  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402
from quire.errors import CapacityError  # noqa: E402

SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True, logprobs=0, repetition_penalty=1.1)
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 9, 3]]}
VARIANTS = {
    "plain": (GREEDY, {}),
    "seeds": (SEEDED, {}),
    "int8 cache": (GREEDY, {"kv_cache_dtype": "int8"}),
    "fp8 cache": (GREEDY, {"kv_cache_dtype": "fp8"}),
    "few blocks": (GREEDY, {}),
    "guesses": (GREEDY, {"speculative_config": SUFFIX}),
}


def answers(folder: str, vocab_size: int, params: SamplingParams, options: dict) -> tuple[list, list]:
    llm = LLM(folder, **{**OPTIONS, "load_format": "dummy", **options})
    try:
        found = [output.outputs[0] for output in llm.generate(prompts(vocab_size), params, use_tqdm=False)]
    finally:
        llm.close()
    logprobs = [[entry[token].logprob for entry, token in zip(each.logprobs, each.token_ids)] for each in found]
    return [each.token_ids for each in found], logprobs


def few_blocks(folder: str) -> int:
    """So few that requests are preempted; a model with several kinds of layers needs some of each."""
    num_blocks = 18
    while True:
        try:
            LLM(folder, **{**OPTIONS, "load_format": "dummy", "num_gpu_blocks_override": num_blocks}).close()
        except CapacityError:
            num_blocks += 6
        else:
            return num_blocks


def compare(fields: dict, layout: dict, variant: str) -> str:
    params, options = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        if why := refusal(folder, layout):
            return f"refused: {why}"
        if variant == "few blocks":
            options = {"num_gpu_blocks_override": few_blocks(folder)}
        tokens, logprobs = answers(folder, fields["vocab_size"], params, options)
        divided = {**options, **layout, "executor": "tests.layouts.executor"}
        found, found_logprobs = answers(folder, fields["vocab_size"], params, divided)
    if found != tokens:
        return "DIFFERENT TOKENS"
    error = max(abs(a - b) for xs, ys in zip(found_logprobs, logprobs) for a, b in zip(xs, ys))
    tolerance = 10 * TOLERANCE if "kv_cache_dtype" in options else TOLERANCE
    return f"equal, {error:.1e}" if error < tolerance else f"LOGPROBS DIFFER BY {error:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of model files and variants (default: all)")
    parser.add_argument("--options", action="store_true", help="with all options, not only as they are")
    args = parser.parse_args()
    cases = {name: fields for name, fields in all_cases().items() if not args.names or name in args.names}
    variants = VARIANTS if args.options else {"plain": VARIANTS["plain"]}
    num_wrong = 0
    for name, fields in cases.items():
        for layout, division in LAYOUTS.items():
            for variant in variants:
                started = time.monotonic()
                verdict = compare(fields, division, variant)
                num_wrong += verdict.isupper() or verdict.startswith("LOGPROBS")
                print(
                    f"{name:40.40} {layout:20} {variant:12} {verdict} ({time.monotonic() - started:.1f} s)", flush=True
                )
    end_all()
    print(f"{num_wrong} cases are wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
