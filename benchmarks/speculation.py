"""What speculative decoding gains: `python benchmarks/speculation.py MODEL --sides ngram suffix prediction`.

One request at a time, greedy: a function to be rewritten with another name, a passage to be repeated, a story without
anything to match; with `--tasks functions`, twenty functions to be written. Each side is an engine beside one without
speculation, their runs alternating. Printed are tokens per second without, how many times that the side reaches (median
of rounds), both from the first token on, the same with the prompt's time in it, which share of its guesses was right,
how many tokens a step gave, and how many tokens are those without.
"suffix" looks at the request alone, since its runs would find their own answers; "prediction" sends the answer itself,
a contiguous tenth of it replaced; "draft_model" needs `--draft`. Models are names, files or folders.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from quire import LLM, SamplingParams  # noqa: E402
from quire.messages import AddRequest  # noqa: E402

SIDES = ("ngram", "suffix", "prediction", "draft_model")
FUNCTIONS = {
    "fibonacci(n: int) -> int": "Return the n-th Fibonacci number.",
    "is_palindrome(text: str) -> bool": "Whether the text reads the same backwards.",
    "merge_sorted(a: list[int], b: list[int]) -> list[int]": "Merge two sorted lists into a sorted one.",
    "is_prime(n: int) -> bool": "Whether n is a prime number.",
    "count_vowels(text: str) -> int": "Count the vowels of a text.",
    "factorial(n: int) -> int": "Return n!.",
    "flatten(nested: list) -> list": "Flatten a list of lists of any depth.",
    "gcd(a: int, b: int) -> int": "Return the greatest common divisor.",
    "running_max(numbers: list[int]) -> list[int]": "Return the largest number so far at each place.",
    "remove_duplicates(items: list) -> list": "Remove duplicates, and keep the order.",
    "word_counts(text: str) -> dict[str, int]": "Count how often each word occurs.",
    "transpose(matrix: list[list[int]]) -> list[list[int]]": "Return the transposed matrix.",
    "binary_search(items: list[int], wanted: int) -> int": "Return the index of wanted in a sorted list, or -1.",
    "to_roman(n: int) -> str": "Write a number in Roman numerals.",
    "is_balanced(text: str) -> bool": "Whether all brackets of the text are balanced.",
    "quick_sort(items: list[int]) -> list[int]": "Sort a list with quicksort.",
    "caesar(text: str, shift: int) -> str": "Encrypt a text by shifting its letters.",
    "median(numbers: list[float]) -> float": "Return the median.",
    "chunks(items: list, size: int) -> list[list]": "Cut a list into pieces of the given size.",
    "common_prefix(words: list[str]) -> str": "Return the longest common prefix.",
}


def tasks(name: str) -> dict[str, list]:
    """Prompts by task: texts to be continued, or conversations."""
    if name == "functions":
        return {"functions": [f'def {head}:\n    """{text}"""\n' for head, text in FUNCTIONS.items()]}
    code = (ROOT / "src" / "quire" / "registry.py").read_text()
    function = code[code.index("def names") : code.index("@functools")]
    passage = (ROOT / "README.md").read_text()[:2500]
    rewrite = "Rewrite this code. Rename the function `names` to `extensions`. Change nothing else."
    questions = {
        "rewrite": f"{rewrite}\n```python\n{function}\n```",
        "repeat": f"Repeat this text exactly.\n{passage}",
        "story": "Tell me a story about a lighthouse keeper who finds a message.",
    }
    return {task: [[{"role": "user", "content": text}]] for task, text in questions.items()}


def options(side: str, draft: str | None, num_tokens: int | None) -> dict:
    if side == "prediction":
        return {}
    settings: dict = {"method": side}
    if side == "suffix":
        settings["suffix_decoding_max_cached_requests"] = 0
    if side == "draft_model":
        settings["model"] = draft
    if num_tokens is not None:
        settings["num_speculative_tokens"] = num_tokens
    return {"speculative_config": settings}


def predict(llm: LLM, answer: list[int]) -> None:
    """The next requests of this engine come with this answer, a tenth of which is wrong, as a prediction."""
    send = type(llm.client).send
    first, count = len(answer) * 4 // 10, len(answer) // 10
    prediction = answer[:first] + [answer[0]] * count + answer[first + count :]

    def send_predicted(message: object) -> None:
        if isinstance(message, AddRequest):
            message = msgspec.structs.replace(message, prediction=prediction)
        send(llm.client, message)

    llm.client.send = send_predicted


def timed(llm: LLM, prompt: str | list, params: SamplingParams) -> tuple[list[int], float, float]:
    """(token ids, seconds from the first of them on, seconds of all)."""
    started = time.perf_counter()
    first = 0.0
    token_ids: list[int] = []
    for output in llm.stream(prompt if isinstance(prompt, str) else llm.encode_chat(prompt), params):
        first = first or time.perf_counter()
        token_ids = output.outputs[0].token_ids
    ended = time.perf_counter()
    return token_ids, ended - first, ended - started


def compare(plain: LLM, other: LLM, side: str, prompts: list, params: SamplingParams, rounds: int) -> str:
    times: dict[LLM, list[tuple[float, float]]] = {plain: [], other: []}  # from the first token on; of all
    num_equal = num_tokens = 0
    before = other.client.engine.stats()
    for round_idx in range(rounds + 1):
        spent = {llm: (0.0, 0.0) for llm in times}
        for prompt in prompts[:1] if round_idx == 0 else prompts:  # the first round warms up
            answers = {}
            for llm in times:
                if llm is other and side == "prediction":
                    predict(llm, answers[plain])
                answers[llm], *seconds = timed(llm, prompt, params)
                spent[llm] = spent[llm][0] + seconds[0], spent[llm][1] + seconds[1]
            if round_idx:
                num_tokens += len(answers[plain])
                num_equal += sum(a == b for a, b in zip(answers[plain], answers[other]))
        if round_idx:
            for llm, seconds in spent.items():
                times[llm].append(seconds)
        else:
            before = other.client.engine.stats()
    stats = other.client.engine.stats()
    num_drafts = stats.num_draft_tokens - before.num_draft_tokens
    num_accepted = sum(stats.accepted_drafts) - sum(before.accepted_drafts)
    speed = num_tokens / sum(decode for decode, _ in times[plain])
    pairs = list(zip(times[plain], times[other]))
    ratio, of_all = (median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
    per_step = num_tokens / (num_tokens - num_accepted)
    share = num_accepted / max(1, num_drafts)
    return f"{speed:.1f} | {ratio:.2f}x | {of_all:.2f}x | {share:.0%} | {per_step:.2f} | {num_equal} of {num_tokens}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--sides", nargs="+", default=["ngram", "suffix", "prediction"], choices=SIDES)
    parser.add_argument("--draft", help="the small model")
    parser.add_argument("--tasks", default="texts", choices=("texts", "functions"))
    parser.add_argument("--tokens", type=int, default=300, help="of an answer")
    parser.add_argument("--guesses", type=int, help="num_speculative_tokens")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    common = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False}
    print("| | side | tok/s without | with | prompt too | right | tokens a step | equal |\n" + "| --- " * 8 + "|")
    with LLM(args.model, **common) as plain:
        for side in args.sides:
            with LLM(args.model, **common, **options(side, args.draft, args.guesses)) as other:
                for task, prompts in tasks(args.tasks).items():
                    print(
                        f"| {task} | {side} | {compare(plain, other, side, prompts, params, args.rounds)} |", flush=True
                    )


if __name__ == "__main__":
    main()
