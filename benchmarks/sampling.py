"""Time of one sampling step, in milliseconds: `python -m benchmarks.sampling`, or this file with the package installed.

Logits follow Zipf's law with noise, roughly as those of a language model: 50 to 130 tokens hold 95% of the mass. Each
figure is the best of several runs, because machines are shared. Histories have 512 tokens, half of them output.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tests.sampling.on_cpu import sampling_rows  # noqa: E402

from quire.ops.sampling import cpu as sampling  # noqa: E402
from quire.ops.vocab import cpu as vocab  # noqa: E402
from quire.params import SamplingParams  # noqa: E402
from quire.sampling.sampler import Sampler  # noqa: E402

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_k 50": SamplingParams(top_k=50),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "logprobs 5": SamplingParams(temperature=0, logprobs=5),
}
HISTORY_TOKENS = 512


def zipf_logits(num_rows: int, vocab_size: int) -> Tensor:
    logits = -1.6 * torch.arange(1, vocab_size + 1).float().log() + 0.5 * torch.randn(num_rows, vocab_size)
    return logits[:, torch.randperm(vocab_size)].contiguous()


def best_step_ms(params: SamplingParams, num_rows: int, vocab_size: int, num_runs: int) -> float:
    logits = zipf_logits(num_rows, vocab_size)
    batch = sampling_rows(num_rows, vocab_size)
    for row in range(num_rows):
        batch.set(row, params, seed=row, prompt_len=HISTORY_TOKENS // 2)
    tokens = torch.randint(vocab_size, (num_rows, HISTORY_TOKENS + num_runs + 2), dtype=torch.int32)
    sampler = Sampler(sampling.sample, vocab.mask_logits, batch, tokens)
    rows, positions = torch.arange(num_rows), torch.full((num_rows,), HISTORY_TOKENS)
    token_ids = torch.empty(num_rows, dtype=torch.int32)
    scratch = torch.empty_like(logits)
    best_s = float("inf")
    for run in range(num_runs + 2):  # two to warm up
        scratch.copy_(logits)
        start = time.perf_counter()
        sampler.sample(scratch, range(num_rows), rows, positions + run, token_ids)
        if run >= 2:
            best_s = min(best_s, time.perf_counter() - start)
    return best_s * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="runs per figure, of which the best counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shapes = [(rows, vocab) for vocab in (49_152, 151_936) for rows in (1, 64)]
    print(f"milliseconds per step, best of {args.runs}, {args.threads} threads")
    print(f"{'':14}" + "".join(f"{f'{rows} x {vocab:,}':>14}" for rows, vocab in shapes))
    for name, params in CASES.items():
        figures = (best_step_ms(params, rows, vocab, args.runs) for rows, vocab in shapes)
        print(f"{name:14}" + "".join(f"{figure:14.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
