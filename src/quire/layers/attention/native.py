"""Compiled for this CPU: float32 and bfloat16, head sizes and block sizes in multiples of 16."""

import torch

from quire.layers.attention.base import CpuBackend
from quire.ops.attention.cpu import paged_attention, supported
from quire.ops.elementwise.cpu import rope_and_write


class Native(CpuBackend):
    rope_and_write = staticmethod(rope_and_write)
    paged_attention = staticmethod(paged_attention)


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, cache_dtype: torch.dtype
) -> str | None:
    if supported(dtype, cache_dtype, head_size, block_size):
        return None
    return f"no kernel is compiled for {dtype}, head size {head_size} and blocks of {block_size}"


BACKEND = Native
