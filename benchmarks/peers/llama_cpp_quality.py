"""The mean log-probability that llama.cpp gives a text's tokens. Run by `benchmarks/quality.py`.

`llama_cpp_quality.py MODEL.gguf`: pieces of token ids come as JSON on standard input, by text; the means leave as JSON.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama


def total_logprob(llm: Llama, piece: list[int]) -> float:
    llm.reset()
    llm.eval(piece)
    total = 0.0
    for i, token in enumerate(piece[1:]):
        logits = llm.scores[i].astype(np.float64)
        largest = logits.max()
        total += logits[token] - largest - np.log(np.exp(logits - largest).sum())
    return total


def main() -> None:
    texts: dict[str, list[list[int]]] = json.load(sys.stdin)
    longest = max(len(piece) for pieces in texts.values() for piece in pieces)
    llm = Llama(sys.argv[1], n_ctx=longest, logits_all=True, verbose=False, n_threads=2, n_threads_batch=2)
    means = {}
    for name, pieces in texts.items():
        count = sum(len(piece) - 1 for piece in pieces)
        means[name] = sum(total_logprob(llm, piece) for piece in pieces) / count
    print(json.dumps(means))


if __name__ == "__main__":
    main()
