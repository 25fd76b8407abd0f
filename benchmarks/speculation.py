"""What speculative decoding gains: `python benchmarks/speculation.py MODEL [--sides ngram suffix prediction]`.

One request at a time, greedy: a function to be rewritten with another name, a passage to be repeated, a story without
anything to match. Each side is an engine of its own and their runs alternate; printed are the tokens per second without
speculation, how many times that each side reaches (medians), which share of its drafts was right, and how many of its
tokens are those without. "suffix" looks at the request alone, since its runs would find their own answers; the side
"prediction" sends the answer itself, a contiguous tenth of it replaced, as a prediction. Model: a name, file or folder.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from quire import LLM, SamplingParams  # noqa: E402
from quire.messages import AddRequest  # noqa: E402

SIDES: dict[str, dict] = {
    "ngram": {"speculative_config": {"method": "ngram"}},
    "suffix": {"speculative_config": {"method": "suffix", "suffix_decoding_max_cached_requests": 0}},
    "prediction": {},
}


def prompts() -> dict[str, str]:
    code = (ROOT / "src" / "quire" / "registry.py").read_text()
    function = code[code.index("def names") : code.index("@functools")]
    passage = (ROOT / "README.md").read_text()[:2500]
    rewrite = "Rewrite this code. Rename the function `names` to `extensions`. Change nothing else."
    return {
        "rewrite": f"{rewrite}\n```python\n{function}\n```",
        "repeat": f"Repeat this text exactly.\n{passage}",
        "story": "Tell me a story about a lighthouse keeper who finds a message.",
    }


def predicted(llm: LLM, answer: list[int]) -> None:
    """The next request of this engine comes with its answer, a tenth of which is wrong, as a prediction."""
    send = type(llm.client).send
    first, count = len(answer) * 4 // 10, len(answer) // 10
    prediction = answer[:first] + [answer[0]] * count + answer[first + count :]

    def send_predicted(message: object) -> None:
        if isinstance(message, AddRequest):
            message = msgspec.structs.replace(message, prediction=prediction)
        send(llm.client, message)

    llm.client.send = send_predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    print(f"| | tok/s | {' | '.join(args.sides)} |\n| --- | --- |{' --- |' * len(args.sides)}")
    with ExitStack() as stack:
        common = {"max_model_len": 4096, "kv_cache_memory_bytes": 1 << 29}
        options = {"none": {}} | {side: SIDES[side] for side in args.sides}
        llms = {side: stack.enter_context(LLM(args.model, **common, **some)) for side, some in options.items()}
        for name, content in prompts().items():
            times: dict[str, list[float]] = {side: [] for side in llms}
            tokens: dict[str, list[int]] = {}
            shares: dict[str, float] = {}
            for run in range(args.runs + 1):
                for side, llm in llms.items():
                    if side == "prediction":
                        predicted(llm, tokens["none"])
                    before = llm.client.engine.stats()
                    started = time.perf_counter()
                    output = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)[0]
                    if run:  # the first warms up
                        times[side].append(time.perf_counter() - started)
                    stats = llm.client.engine.stats()
                    tokens[side] = output.outputs[0].token_ids
                    num_drafts = stats.num_draft_tokens - before.num_draft_tokens
                    num_accepted = sum(stats.accepted_drafts) - sum(before.accepted_drafts)
                    shares[side] = num_accepted / max(1, num_drafts)
            base = median(times["none"])
            cells = []
            for side in args.sides:
                equal = sum(a == b for a, b in zip(tokens["none"], tokens[side], strict=True))
                cells.append(f"{base / median(times[side]):.2f}x, {shares[side]:.0%} right, {equal} equal")
            print(f"| {name} | {args.tokens / base:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
