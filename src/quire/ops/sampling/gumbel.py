"""Drawing from softmax(logits) with counter-based noise: the same key gives the same token on every device.

Called by the sampler. Knows nothing of requests or of processors; keeps no state between calls.

The noise of one token, which every twin of this file reproduces, bit for bit except for `log` and `log1p`. It uses the
mixers of splitmix64 and lowbias32; int64 and int32 wrap around, >>> is a logical shift, >> an arithmetic one.

    mix64(z):   z ^= z >>> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >>> 27;  z *= 0x94D049BB133111EB;  z ^= z >>> 31
    mix32(t):   t ^= t >>> 16;  t *= 0x7FEB352D;  t ^= t >>> 15;  t *= 0x846CA68B;  t ^= t >>> 16
    key         = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ (choice << 32 | position))       once per row, 64 bits
    h           = (mix32(token_id) ^ low32(key)) * (high32(key) | 1)                        32 bits from here on
    h           = (h ^ (h >> 15)) * 0x846CA68B
    v           = (abs(float32(h)) + 0.5) * (2**-31 - 2**-55)                               float32, in (0, 1)
    E           = -log1p(-v)                                                                exponential
    score       = logit - log(E);  the token is the lowest id with the largest score

The uniform number is v and not 1 - v, so that small E, which win, have 31 bits of resolution: tokens of probability
1e-8 are drawn as often as they should be.

Letters: R rows, V vocabulary or candidates, B blocks of 64 tokens (or the tokens of one), N blocks searched.
"""

import math

import torch
from torch import Tensor

from quire.ops.vocab.reference import block_ids, block_max, row_argmax

V_SCALE = 2.0**-31 - 2.0**-55
CHUNK_ENTRIES = 1 << 17  # 512 KiB per temporary: they stay in a core's L2
FEW_ENTRIES = 1 << 18  # below, logarithms of all entries cost less than finding out which are needed
LN_2 = math.log(2.0)


def gumbel_argmax(
    logits_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    choices_R: Tensor,
    ids_RV: Tensor | None = None,
    words_V: Tensor | None = None,
) -> Tensor:
    """One token id per row, drawn from softmax(logits_RV), float32; seeds, positions and choices are int64.

    `ids_RV` are the token ids of the entries, where rows hold candidates instead of the whole vocabulary.
    `words_V` are the vocabulary's `token_words`, if they are computed already.
    A row without a finite logit gives its lowest id.
    """
    key_R = row_key(seeds_R, positions_R, choices_R)
    if ids_RV is not None:
        score_RV = _score(logits_RV, _mix32(ids_RV.int()), key_R)
        best_RV = score_RV == score_RV.amax(-1, keepdim=True)
        return ids_RV.masked_fill(~best_RV, torch.iinfo(ids_RV.dtype).max).amin(-1)
    words_V = token_words(logits_RV.shape[1], logits_RV.device) if words_V is None else words_V
    if logits_RV.is_cuda or logits_RV.numel() < FEW_ENTRIES:
        return row_argmax(_score(logits_RV, words_V, key_R))[1]
    return _argmax_score(logits_RV, words_V, key_R)


def _argmax_score(logits_RV: Tensor, words_V: Tensor, key_R: Tensor) -> Tensor:
    """argmax of `_score`, with logarithms only in the few blocks that can hold it."""
    bound_RB = _block_bounds(logits_RV, words_V, key_R)

    def best_in(rows_N: Tensor, blocks_N: Tensor) -> tuple[Tensor, Tensor]:
        ids_NB = block_ids(blocks_N).clamp(max=logits_RV.shape[1] - 1)
        score_N, place_N = _score(logits_RV[rows_N[:, None], ids_NB], words_V[ids_NB], key_R[rows_N]).max(-1)
        return score_N, ids_NB.gather(1, place_N[:, None])[:, 0]

    # The best score in the block with the highest bound is a floor: blocks with bounds below it need not be searched.
    floor_R, _ = best_in(torch.arange(len(key_R), device=key_R.device), bound_RB.argmax(-1))
    rows_N, blocks_N = (bound_RB >= floor_R[:, None]).nonzero(as_tuple=True)
    score_N, ids_N = best_in(rows_N, blocks_N)
    best_R = floor_R.scatter_reduce(0, rows_N, score_N, "amax")
    ids_N.masked_fill_(score_N < best_R[rows_N], logits_RV.shape[1])
    return torch.full_like(key_R, logits_RV.shape[1]).scatter_reduce_(0, rows_N, ids_N, "amin")


def _block_bounds(logits_RV: Tensor, words_V: Tensor, key_R: Tensor) -> Tensor:
    """An upper bound of the scores in each block of tokens.

    E >= v, and a float's bits as a fixed-point number give at most its log2, so a score is at most
    logit - ln2 * (bits(v) * 2**-23 - 127). The slack added at the end is for float32's rounding.
    """
    num_rows = max(1, CHUNK_ENTRIES // logits_RV.shape[1])
    # Shared by all chunks: a new temporary per operation would cost as much as the operation.
    scratch = torch.empty_like(logits_RV[:num_rows])
    out = torch.empty_like(scratch, dtype=torch.int32)
    bounds = []
    for logits, key in zip(logits_RV.split(num_rows), key_R.split(num_rows), strict=True):
        x = scratch[: len(key)]
        h = _hash(words_V, key, out[: len(key)], x.view(torch.int32))
        x.copy_(h).abs_()  # v * 2**31
        x.copy_(x.view(torch.int32))  # (log2(v) + 127 + 31) * 2**23, or less
        bounds.append(block_max(torch.add(logits, x, alpha=-LN_2 * 2.0**-23, out=x)))
    bound_RB = torch.cat(bounds).add_((127 + 31) * LN_2)
    return bound_RB.add_(1e-3 + 1e-6 * bound_RB.amax(-1, keepdim=True).abs().clamp(max=1e30))


def _score(logits_RV: Tensor, words_RV: Tensor, key_R: Tensor) -> Tensor:
    v_RV = _hash(words_RV, key_R).float().abs_().add_(0.5).mul_(V_SCALE)
    return torch.sub(logits_RV, v_RV.neg_().log1p_().neg_().log_())


def _hash(words_RV: Tensor, key_R: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    low_R1, high_R1 = key_R.int()[:, None], (key_R >> 32).int()[:, None] | 1
    h_RV = torch.bitwise_xor(words_RV, low_R1, out=out).mul_(high_R1)
    return h_RV.bitwise_xor_(torch.bitwise_right_shift(h_RV, 15, out=scratch)).mul_(_signed(0x846CA68B, 32))


def row_key(seeds_R: Tensor, positions_R: Tensor, choices_R: Tensor) -> Tensor:
    return _mix64(_mix64(seeds_R + _signed(0x9E3779B97F4A7C15, 64)) ^ ((choices_R << 32) | positions_R))


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _logical_shift(z, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _logical_shift(z, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return z ^ _logical_shift(z, 31, 64)


def _mix32(t: Tensor) -> Tensor:
    t = (t ^ _logical_shift(t, 16, 32)) * 0x7FEB352D
    t = (t ^ _logical_shift(t, 15, 32)) * _signed(0x846CA68B, 32)
    return t ^ _logical_shift(t, 16, 32)


def token_words(vocab_size: int, device: torch.device) -> Tensor:
    """mix32 of every token id, the same in all draws."""
    return _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _logical_shift(x: Tensor, shift: int, num_bits: int) -> Tensor:
    return (x >> shift) & ((1 << (num_bits - shift)) - 1)


def _signed(word: int, num_bits: int) -> int:
    """The word as torch takes it, a signed number."""
    return word - (1 << num_bits) if word >> (num_bits - 1) else word
