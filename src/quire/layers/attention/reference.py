"""Plain torch: any dtype, head size and block size."""

import torch

from quire.ops.ref.attention import paged_attention
from quire.ops.ref.elementwise import rope_and_write

__all__ = ["paged_attention", "rope_and_write", "why_not"]


def why_not(device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, padded: bool) -> str | None:
    return None
