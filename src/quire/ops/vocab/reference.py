"""Reductions over a vocabulary: argmax, the largest entries, the sum of exponentials, a count; made for a CPU.

Called by the sampler and by `gumbel.py`. Knows rows of numbers, nothing of requests. torch's own argmax and topk visit
entries one by one with their index; here a vectorized maximum per block comes first, and only a few blocks are
searched.

Letters: R rows, V vocabulary, B blocks of a row, N entries searched, K entries asked for. Rows must not hold NaN except
in `row_argmax`. Each result depends on its row alone, bit for bit except for `exp`: sums are per block, then in
float64.
"""

import torch
from torch import Tensor

BLOCK = 64
TOPK_BLOCK = 32  # slower to reduce than 64, but half as much to search
CHUNK_ENTRIES = 1 << 17  # entries worked on at a time, so that temporaries stay in a core's L2
LOW_32_BITS = 0xFFFF_FFFF


def block_max(x_RV: Tensor, size: int = BLOCK) -> Tensor:
    """The maximum of each block of entries, [R, B]; the last block may be shorter."""
    whole, tail = x_RV.split([x_RV.shape[1] // size * size, x_RV.shape[1] % size], dim=1)
    max_RB = whole.unflatten(1, (-1, size)).amax(-1)
    return torch.cat([max_RB, tail.amax(-1, keepdim=True)], dim=1) if tail.shape[1] else max_RB


def block_ids(blocks: Tensor, size: int = BLOCK) -> Tensor:
    """The ids of each block's entries; those of a short last block may lie outside of the vocabulary."""
    return blocks[..., None] * size + torch.arange(size, device=blocks.device)


def row_argmax(x_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its lowest index per row. A NaN counts as the largest value, as in torch."""
    if x_RV.is_cuda or x_RV.shape[1] < 16 * BLOCK:
        top_R, ids_R = x_RV.max(-1)
        return top_R, ids_R
    ids_RN = block_ids(block_max(x_RV).argmax(-1)).clamp(max=x_RV.shape[1] - 1)
    top_R, place_R = x_RV.gather(1, ids_RN).max(-1)
    return top_R, ids_RN.gather(1, place_R[:, None])[:, 0]


def row_topk(x_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest float32 entries and their ids, [R, K], in descending order; of equals the lower id first."""
    vocab_size = x_RV.shape[1]
    num_rows = max(1, CHUNK_ENTRIES // min(vocab_size, max(k, 1) * TOPK_BLOCK))
    if len(x_RV) > num_rows and not x_RV.is_cuda:
        values, ids = zip(*(row_topk(chunk, k) for chunk in x_RV.split(num_rows)), strict=True)
        return torch.cat(values), torch.cat(ids)
    if x_RV.is_cuda or max(1024, k * TOPK_BLOCK) * 2 > vocab_size:
        ids_RN = torch.arange(vocab_size, device=x_RV.device).expand_as(x_RV)
        values_RN = x_RV
    else:  # the k first entries lie in the k first blocks, if blocks are ordered in the same way by their maxima
        _, blocks_RK = row_topk(block_max(x_RV, TOPK_BLOCK), k)
        ids_RN = block_ids(blocks_RK, TOPK_BLOCK).flatten(1)
        values_RN = x_RV.gather(1, ids_RN.clamp(max=vocab_size - 1))
    # One integer per entry that sorts by value, then by id: the order is total, so it cannot depend on the algorithm.
    key_RN = (_sortable(values_RN) << 32) | (LOW_32_BITS - ids_RN)
    if vocab_size % TOPK_BLOCK:
        key_RN.masked_fill_(ids_RN >= vocab_size, torch.iinfo(torch.int64).min)
    key_RK = key_RN.topk(k).values
    return _unsortable(key_RK >> 32), LOW_32_BITS - (key_RK & LOW_32_BITS)


def row_sum_exp(x_RV: Tensor, max_R: Tensor) -> Tensor:
    """sum(exp(x - max)) per row, in float64."""
    num_rows = len(x_RV) if x_RV.is_cuda else max(1, CHUNK_ENTRIES // x_RV.shape[1])
    max_R1 = max_R.masked_fill(max_R == -torch.inf, 0.0)[:, None]
    padded = -x_RV.shape[1] % BLOCK + x_RV.shape[1]
    exp_RV = x_RV.new_zeros(min(num_rows, len(x_RV)), padded)
    sums = []
    for x, max_x in zip(x_RV.split(num_rows), max_R1.split(num_rows), strict=True):
        exp = exp_RV[: len(x), : x.shape[1]]
        torch.sub(x, max_x, out=exp).clamp_(min=-80.0).exp_()  # exp of less gives denormals, which are slow
        sums.append(exp_RV[: len(x)].unflatten(1, (-1, BLOCK)).sum(-1).sum(-1, dtype=torch.float64))
    return torch.cat(sums)


def row_count_above(x_RV: Tensor, floor_R: Tensor) -> Tensor:
    """How many entries of each row exceed the row's floor."""
    # Counting in float32 is exact below 2**24 and, unlike a sum of booleans, vectorized.
    above_RV = torch.gt(x_RV, floor_R[:, None], out=torch.empty_like(x_RV))
    return above_RV.sum(-1).long()


def _sortable(x: Tensor) -> Tensor:
    """int64 in the order of the floats: negative floats have their magnitude bits flipped; -0 becomes 0."""
    bits = (x + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).long()


def _unsortable(x: Tensor) -> Tensor:
    bits = x.int()
    return (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).view(torch.float32)
