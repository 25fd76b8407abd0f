"""Whether 8-bit KV caches still find a number hidden in a long text: `benchmarks/retrieval.py MODEL --text FILE`.

A sentence with a number is put into a text of `--tokens` tokens, at ten depths; the model is asked for the number, and
answers greedily. Printed are the answers of every `--kv-cache-dtype`, by depth, and how many are right.
"""

import argparse
import random
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from quire import LLM, SamplingParams  # noqa: E402

DEPTHS = 10
QUESTION = "\n\nWhat is the secret number mentioned above?"
PARAMS = SamplingParams(temperature=0, max_tokens=24)


def prompts(llm: LLM, text: str, num_tokens: int) -> list[tuple[int, str]]:
    """(number, text that hides it) by depth."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text)[:num_tokens]
    source = random.Random(0)
    found = []
    for i in range(DEPTHS):
        number = source.randrange(100_000, 1_000_000)
        place = len(ids) * (2 * i + 1) // (2 * DEPTHS)
        before, after = tokenizer.decode(ids[:place]), tokenizer.decode(ids[place:])
        found.append((number, f"{before}\n\nThe secret number is {number}.\n\n{after}{QUESTION}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--kinds", nargs="+", default=["auto", "int8", "fp8"])
    args = parser.parse_args()
    for kind in args.kinds:
        started = time.monotonic()
        with LLM(args.model, kv_cache_dtype=kind, max_model_len=args.tokens + 400) as llm:
            answers = []
            for number, content in prompts(llm, args.text.read_text(), args.tokens):
                output = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)[0]
                said = re.sub(r"\D", "", output.outputs[0].text)[:6]
                answers.append(said if said == str(number) else f"{said or '-'} (not {number})")
        right = sum("not" not in answer for answer in answers)
        seconds = time.monotonic() - started
        print(f"{kind}: {right} of {DEPTHS} right, {seconds:.0f} s: {', '.join(answers)}", flush=True)


if __name__ == "__main__":
    main()
