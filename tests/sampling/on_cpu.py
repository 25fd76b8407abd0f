"""The sampler as a CPU's runner calls it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu import sampling, vocab
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import SampleLogprobs, SampleMasks, Sampler


class Sampled(NamedTuple):
    token_ids: Tensor
    logprobs: SampleLogprobs | None


def sample(
    logits: Tensor,
    rows: Sequence[int],
    batch: SamplingRows,
    tokens: Tensor,
    positions: Tensor,
    masks: SampleMasks | None = None,
) -> Sampled:
    token_ids = torch.full((len(rows),), -77, dtype=torch.int32)
    sampler = Sampler(sampling.sample, vocab.mask_logits, batch, tokens)
    rows_S = torch.tensor(list(rows), dtype=torch.int64)
    return Sampled(token_ids, sampler.sample(logits, rows, rows_S, positions, token_ids, masks))
