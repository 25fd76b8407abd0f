"""Every model file and variant, divided over processes in every layout: `python benchmarks/ranks_exact.py [NAME …]`.

In float32, with random weights: prompts of several lengths, computed in chunks, one of which finds a prefix; 64 tokens
must be those of one process, and logprobs within 1e-4. With `--options` also with an 8-bit cache, few blocks, seeds,
guessed tokens, a schema, top logprobs and weights that are rounded while loading. Ranks add up in another order than
one process, so a value on the border between two codes of an 8-bit cache may fall to the other side: there logprobs may
differ by ten times as much. Scales of int8 weights are those of a rank's part: there tokens must be the same up to the
first one that another token was about as good for. What may be refused is `tp 3`, where a model has too few heads, and
weights whose blocks would be cut. The exit status is 1 if anything is not so. `tests/layouts` has one case per model
file of this.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.layouts.executor import end_all  # noqa: E402
from tests.layouts.test_features import SCHEMA, is_clear  # noqa: E402
from tests.layouts.test_models import GREEDY, LAYOUTS, OPTIONS, prompts, refusal  # noqa: E402
from tests.models.oracle import TOLERANCE, all_cases  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402
from quire.checkpoint.find import find  # noqa: E402
from quire.errors import CapacityError, UnsupportedModelError  # noqa: E402
from quire.params import StructuredOutputs  # noqa: E402

SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True, logprobs=0, repetition_penalty=1.1)
TOP = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5, prompt_logprobs=2)
SHAPED = SamplingParams(temperature=0, max_tokens=64, logprobs=0, structured_outputs=StructuredOutputs(json=SCHEMA))
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 9, 3]]}
VARIANTS = {
    "plain": (GREEDY, {}),
    "seeds": (SEEDED, {}),
    "int8 cache": (GREEDY, {"kv_cache_dtype": "int8"}),
    "fp8 cache": (GREEDY, {"kv_cache_dtype": "fp8"}),
    "few blocks": (GREEDY, {}),
    "guesses": (GREEDY, {"speculative_config": SUFFIX}),
    "a schema": (SHAPED, {}),
    "top logprobs": (TOP, {}),
    "mxfp4": (GREEDY, {"quantization": "mxfp4"}),
    "int8": (TOP, {"quantization": "int8"}),
}
WIDTHS = {"intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner"}
IN_INT8 = 0.1  # how much logprobs may differ
SHAPED_VOCAB = 49152  # of the default model, whose tokenizer a schema needs


class Answers(NamedTuple):
    tokens: list[list[int]]
    logprobs: list[list[dict]]  # of each answer's tokens
    of_prompts: list[list[dict]]
    num_preemptions: int


class Verdict(NamedTuple):
    text: str
    is_wrong: bool = False
    is_refused: bool = False


def answers(folder: str, vocab_size: int, params: SamplingParams, options: dict) -> Answers:
    llm = LLM(folder, **{**OPTIONS, "load_format": "dummy", **options})
    try:
        outputs = llm.generate(prompts(vocab_size), params, use_tqdm=False)
        stats = llm.client.engine.stats()
    finally:
        llm.close()
    choices = [output.outputs[0] for output in outputs]
    return Answers(
        [choice.token_ids for choice in choices],
        [choice.logprobs for choice in choices],
        [(output.prompt_logprobs or [])[1:] for output in outputs],
        stats.num_preemptions,
    )


def few_blocks(folder: str) -> int:
    """As few as can be, so that requests are preempted; a model with several kinds of layers needs some of each."""
    num_blocks = 4
    while True:
        try:
            LLM(folder, **{**OPTIONS, "load_format": "dummy", "num_gpu_blocks_override": num_blocks}).close()
        except CapacityError:
            num_blocks += 2
        else:
            return num_blocks


def verdicts(fields: dict, variant: str) -> Iterator[tuple[str, Verdict]]:
    """Of a model in one variant: by layout."""
    params, options = VARIANTS[variant]
    if variant == "a schema":
        fields = {**fields, "vocab_size": SHAPED_VOCAB}
        options = {"tokenizer": str(find("smollm2").path), "skip_tokenizer_init": False}
    if variant == "mxfp4":
        fields = {**fields, **dict.fromkeys(WIDTHS & fields.keys(), 128)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        if variant == "few blocks":
            options = {"num_gpu_blocks_override": few_blocks(folder)}
        expected = answers(folder, fields["vocab_size"], params, options)
        for layout in LAYOUTS:
            if why := refusal(folder, LAYOUTS[layout]):
                is_expected = layout == "tp 3" and "--tensor-parallel-size 3 is too many for this model" in why
                yield layout, Verdict(f"refused: {why}", is_wrong=not is_expected, is_refused=True)
                continue
            divided = {**options, **LAYOUTS[layout], "executor": "tests.layouts.executor"}
            try:
                found = answers(folder, fields["vocab_size"], params, divided)
            except UnsupportedModelError as error:
                is_expected = "quantization" in options  # blocks would be cut
                yield layout, Verdict(f"refused: {error}", is_wrong=not is_expected, is_refused=True)
                continue
            yield layout, compare(found, expected, variant)


def compare(found: Answers, expected: Answers, variant: str) -> Verdict:
    if variant == "few blocks" and not (expected.num_preemptions and found.num_preemptions):
        return Verdict("NOTHING WAS PREEMPTED", is_wrong=True)
    if variant == "int8":
        return judged(*up_to_first_unclear(found, expected), IN_INT8)
    is_rounded_cache = "kv_cache_dtype" in VARIANTS[variant][1]
    return judged(found, expected, 10 * TOLERANCE if is_rounded_cache else TOLERANCE)


def up_to_first_unclear(found: Answers, expected: Answers) -> tuple[Answers, Answers]:
    counts = [len(list(takewhile(lambda entry: is_clear(entry, IN_INT8), entries))) for entries in expected.logprobs]

    def cut(answers: Answers) -> Answers:
        tokens, logprobs = (
            [each[:count] for each, count in zip(whole, counts)] for whole in (answers.tokens, answers.logprobs)
        )
        return answers._replace(tokens=tokens, logprobs=logprobs)

    return cut(found), cut(expected)


def judged(found: Answers, expected: Answers, tolerance: float) -> Verdict:
    if found.tokens != expected.tokens:
        return Verdict("DIFFERENT TOKENS", is_wrong=True)
    pairs = zip(values(found), values(expected), strict=True)
    error = max(abs(one - other) for one, other in pairs)
    if error >= tolerance:
        return Verdict(f"LOGPROBS DIFFER BY {error:.1e}", is_wrong=True)
    return Verdict(f"equal, {error:.1e}")


def values(answers: Answers) -> list[float]:
    """All logprobs, those of a position from the largest to the smallest."""
    entries = [entry for each in (*answers.of_prompts, *answers.logprobs) for entry in each]
    return [value for entry in entries for value in sorted((each.logprob for each in entry.values()), reverse=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of model files and variants (default: all)")
    parser.add_argument("--options", action="store_true", help="with all options, not only as they are")
    args = parser.parse_args()
    cases = {name: fields for name, fields in all_cases().items() if not args.names or name in args.names}
    variants = VARIANTS if args.options else {"plain": VARIANTS["plain"]}
    num_wrong = num_refused = 0
    for name, fields in cases.items():
        for variant in variants:
            started = time.monotonic()
            for layout, verdict in verdicts(fields, variant):
                num_wrong += verdict.is_wrong
                num_refused += verdict.is_refused
                took_s, started = time.monotonic() - started, time.monotonic()
                print(f"{name:40.40} {variant:12} {layout:20} {verdict.text} ({took_s:.1f} s)", flush=True)
    end_all()
    print(f"{num_wrong} cases are wrong, {num_refused} were refused")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
