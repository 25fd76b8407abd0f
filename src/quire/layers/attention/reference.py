"""Plain torch: any dtype, head size and block size."""

import torch

from quire.layers.attention.base import CpuBackend
from quire.ops.attention.reference import paged_attention
from quire.ops.elementwise.reference import rope_and_write


class Reference(CpuBackend):
    rope_and_write = staticmethod(rope_and_write)
    paged_attention = staticmethod(paged_attention)


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, cache_dtype: torch.dtype
) -> str | None:
    return None


BACKEND = Reference
