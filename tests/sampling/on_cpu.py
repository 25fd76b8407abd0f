"""The sampler as a CPU's runner calls it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.sampling import cpu as sampling
from quire.ops.vocab import cpu as vocab
from quire.sampling.rows import FLOATS, INTS, SamplingRows, Table
from quire.sampling.sampler import SampleLogprobs, SampleMasks, Sampler


class Sampled(NamedTuple):
    token_ids: Tensor
    logprobs: SampleLogprobs | None


def sampling_rows(num_rows: int, vocab_size: int) -> SamplingRows:
    floats = torch.zeros(num_rows, len(FLOATS))
    ints = torch.zeros(num_rows, len(INTS), dtype=torch.int64)

    def write(row: int, float_record: list[float], int_record: list[int]) -> None:
        floats[row] = torch.tensor(float_record)
        ints[row] = torch.tensor(int_record)

    return SamplingRows(vocab_size, Table(floats, ints, write))


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
