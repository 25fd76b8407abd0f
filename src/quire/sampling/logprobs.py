"""Log-probabilities of chosen tokens and of the most likely ones, from raw logits, as columns.

Called by the sampler for output tokens and by the worker's runner for prompt tokens. Knows nothing of requests.

Letters: T tokens, V vocabulary, K most likely tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.vocab.cpu import repaired_argmax, row_topk
from quire.ops.vocab.reference import row_count_above, row_sum_exp

CHUNK_ENTRIES = 1 << 20  # logits processed at a time: 4 MiB per temporary
GPU_CHUNK_ENTRIES = 1 << 24  # more on a GPU, where launches cost more than memory


class LogprobColumns(NamedTuple):
    logprobs: Tensor  # [T] float32, of the target tokens
    ranks: Tensor  # [T] int64, of the target tokens: 1 + how many tokens are more likely
    top_ids: Tensor  # [T, K] int64, most likely first, or as they were named
    top_logprobs: Tensor  # [T, K] float32


def token_logprobs(logits_TV: Tensor, target_ids_T: Tensor, k: int, named_TK: Tensor | None = None) -> LogprobColumns:
    """log_softmax in float32 at the targets and at the k most likely tokens; memory is bounded whatever T is.

    `named_TK`: token ids that are wanted in place of the most likely ones; -1 where none is.
    """
    chunk_entries = GPU_CHUNK_ENTRIES if logits_TV.is_cuda else CHUNK_ENTRIES
    num_tokens = max(1, chunk_entries // logits_TV.shape[1])
    all_logits, all_targets = logits_TV.split(num_tokens), target_ids_T.long().split(num_tokens)
    all_named = named_TK.split(num_tokens) if named_TK is not None else [None] * len(all_logits)
    chunks = zip(all_logits, all_targets, all_named, strict=True)
    parts = [_token_logprobs(logits.float(), targets, k, named) for logits, targets, named in chunks]
    return LogprobColumns(*map(torch.cat, zip(*parts, strict=True)))


def _token_logprobs(logits_TV: Tensor, target_ids_T: Tensor, k: int, named_TK: Tensor | None) -> LogprobColumns:
    largest_T = repaired_argmax(logits_TV)[0]
    # The log of the float64 sum is added in float64: in float32, logprobs of near-certain tokens would all be equal.
    norm_T1 = (largest_T.double() + row_sum_exp(logits_TV, largest_T).log())[:, None]
    target_T = logits_TV.gather(1, target_ids_T[:, None])[:, 0]
    top_TK, top_ids_TK = row_topk(logits_TV, min(k, logits_TV.shape[1]))
    if named_TK is not None:
        at_named_TK = logits_TV.gather(1, named_TK.clamp(min=0))
        top_TK = torch.where(named_TK < 0, top_TK, at_named_TK)
        top_ids_TK = torch.where(named_TK < 0, top_ids_TK, named_TK)
    return LogprobColumns(
        (target_T - norm_T1[:, 0]).float(),
        row_count_above(logits_TV, target_T) + 1,
        top_ids_TK,
        (top_TK - norm_T1).float(),
    )
