"""Where the end of a text occurred before, in Triton; twin: `reference.py`.

Called by `spec/ngram.py`. Knows tensors only. A program has a row; it looks at BLOCK places of its text at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
PLACES = tl.constexpr(1 << 24)  # more than a row has tokens: matches are compared by size, then by place


def repeat_continuations(
    rows_R: Tensor, lengths: Tensor, tokens: Tensor, smallest: int, largest: int, num_drafts: int
) -> Tensor:
    """As the twin."""
    counts_R = torch.empty(len(rows_R), dtype=torch.int32, device=tokens.device)
    _repeat_kernel[(len(rows_R),)](
        counts_R,
        rows_R,
        lengths,
        tokens,
        lengths.stride(0),
        tokens.stride(0),
        tokens.shape[1],
        SMALLEST=smallest,
        LARGEST=largest,
        NUM_DRAFTS=num_drafts,
        DRAFTS=triton.next_power_of_2(num_drafts),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return counts_R


@triton.jit(do_not_specialize=["max_len"])
def _repeat_kernel(
    counts_ptr,
    rows_ptr,
    lengths_ptr,
    tokens_ptr,
    length_stride,
    row_stride,
    max_len,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0)
    row = tl.load(rows_ptr + r).to(tl.int64)
    last = tl.load(lengths_ptr + row * length_stride) - 1
    text_ptr = tokens_ptr + row * row_stride
    best = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_equal = at < last
        size = tl.zeros((BLOCK,), tl.int32)
        for i in tl.static_range(LARGEST):
            token = tl.load(text_ptr + at - i, mask=is_equal & (at >= i), other=-1)
            is_equal = is_equal & (token == tl.load(text_ptr + last - i, mask=last >= i, other=-2))
            size += is_equal.to(tl.int32)
        best = tl.maximum(best, tl.where(size >= SMALLEST, size * PLACES + at, 0))
    found = tl.max(best, 0)
    place = found % PLACES + 1
    count = tl.where(found > 0, tl.minimum(NUM_DRAFTS, max_len - 1 - last), 0)
    i = tl.arange(0, DRAFTS)
    period = tl.maximum(last + 1 - place, 1)
    drafts = tl.load(text_ptr + place + i % period, mask=i < count, other=0)
    tl.store(text_ptr + last + 1 + i, drafts, mask=i < count)
    tl.store(counts_ptr + r, count)
