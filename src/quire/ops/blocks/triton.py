"""Copies of KV blocks within a cache or between two, by a list of pairs on the device; twin: `ops/blocks/reference.py`.

For whoever moves blocks (offload tiers, copy-on-write): one call per layer, and the layers of a group share the list.
Knows that a block is one piece of memory; not its layout or dtype, nor why it is copied. The list may be padded to a
fixed length, so that a CUDA graph can hold the launch.

Shape letters: P pairs, W int32 words of a block, N of them at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.launch import options, pdl, wait_turn

TILE = 4096  # int32 of a program: with 8 warps, four loads of 16 bytes in flight per thread
NUM_WARPS = 8


def copy_blocks(source_cache: Tensor, target_cache: Tensor, pairs_P2: Tensor) -> None:
    """As the twin; `pairs_P2` is contiguous, int32 or int64.

    A block is contiguous. Its size and the distance to the next one are multiples of 16 bytes.
    """
    source, target = _words(source_cache), _words(target_cache)
    if source_cache.dtype != target_cache.dtype or source_cache.shape[1:] != target_cache.shape[1:]:
        raise ValueError(f"blocks of {source_cache.dtype} {tuple(source_cache.shape[1:])} do not fit the target's")
    num_words = source.shape[1]
    dependent = pdl(target)
    if len(pairs_P2):
        _copy_kernel[len(pairs_P2), triton.cdiv(num_words, TILE)](
            source,
            target,
            pairs_P2,
            source.stride(0),
            target.stride(0),
            W=num_words,
            N=TILE,
            PDL=dependent,
            num_warps=NUM_WARPS,
            **options(dependent),
        )


def _words(cache: Tensor) -> Tensor:
    """The cache as int32 [blocks, W]."""
    words = cache.flatten(1).view(torch.int32) if cache[0].is_contiguous() else None
    if words is None or words.shape[1] % 4 or words.stride(0) % 4 or words.data_ptr() % 16:
        raise ValueError("blocks to be copied must be contiguous and lie at multiples of 16 bytes")
    return words


@triton.jit
def _copy_kernel(
    source, target, pairs, source_stride, target_stride, W: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr
):
    wait_turn(PDL)
    pair = pairs + 2 * tl.program_id(0)
    source_id, target_id = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    if (source_id < 0) | (target_id < 0):
        return
    # The compiler sees that a stride is a multiple of 16, but not of 4 alone: without the hint, loads would be narrow.
    source += tl.multiple_of(source_id * source_stride, 4)
    target += tl.multiple_of(target_id * target_stride, 4)
    at = tl.program_id(1) * N + tl.arange(0, N)
    tl.store(target + at, tl.load(source + at, mask=at < W), mask=at < W)
