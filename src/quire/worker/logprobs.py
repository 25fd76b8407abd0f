"""Logprobs as a step's result has them, and the prompt positions whose logprobs a step must deliver."""

from quire.sampling.logprobs import LogprobColumns
from quire.step import TokenLogprobs

LOGPROBS_AT_ONCE = 64  # positions of a prompt: bounds the logits held at a time


def prompt_span(start: int, count: int, delivered: int, prompt_len: int) -> tuple[int, int]:
    """First and last position whose logprobs a step that computes `count` tokens from `start` on must deliver.

    None if first > last. Token p is predicted by the hidden state of p - 1; the first token has no prediction.
    """
    return max(start + 1, delivered + 1), min(start + count, prompt_len - 1)


def entries(token_ids: list[int], columns: LogprobColumns, num_top: list[int]) -> list[TokenLogprobs]:
    lists = (column.tolist() for column in columns)
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids[:k], top_logprobs[:k])
        for token_id, k, logprob, rank, top_ids, top_logprobs in zip(token_ids, num_top, *lists)
    ]
