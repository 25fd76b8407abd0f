"""Two workers that share one GPU say what one says: `python benchmarks/shared_card.py [--model qwen3-0.6b]`.

Tensor parallelism on a single card, for which NCCL refuses its service: sums go through CUDA IPC. Random weights in
float32; prompts are computed kernel by kernel, decode steps from CUDA graphs, in which the sums are recorded. The two
processes take turns on the card, so times say little about two cards. The exit status is 1 if a token differs.
"""

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from quire import LLM, SamplingParams  # noqa: E402
from quire.executor.multiproc import MultiprocExecutor  # noqa: E402

NUM_PROMPTS, NUM_TOKENS = 4, 64


class SharedCardExecutor(MultiprocExecutor):
    process_module = "benchmarks.shared_card_rank"


EXECUTOR = SharedCardExecutor


def tokens(model: str, **options) -> list[list[int]]:
    source = random.Random(0)
    prompts = [source.choices(range(10, 10_000), k=100 + 50 * i) for i in range(NUM_PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    common = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1024}
    folder = str(ROOT / "benchmarks" / "shapes" / model)
    with LLM(folder, **common, max_num_seqs=8, kv_cache_memory_bytes=4 << 30, **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)  # records graphs
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started
    print(f"{options or 'one process'}: {elapsed_s / NUM_TOKENS * 1e3:.2f} ms a step", flush=True)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of shapes/")
    args = parser.parse_args()
    expected = tokens(args.model)
    found = tokens(args.model, tensor_parallel_size=2, distributed_executor_backend="benchmarks.shared_card")
    differing = sum(a != b for theirs, ours in zip(expected, found) for a, b in zip(theirs, ours, strict=True))
    print(f"{differing} of {NUM_PROMPTS * NUM_TOKENS} tokens differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
