"""Triton kernels for NVIDIA GPUs: float32 and 16-bit floats, head sizes to 512 in steps of 8, blocks of 16 and up."""

import torch

from quire.ops.attention import paged_attention, supports, work_shape
from quire.ops.elementwise import rope_and_write
from quire.ops.fresh import fresh_attention

__all__ = ["fresh_attention", "paged_attention", "rope_and_write", "why_not", "work_shape"]


def why_not(device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, padded: bool) -> str | None:
    if supports(dtype, head_size, block_size):
        return None
    return f"it has no kernel for {dtype}, head size {head_size} and blocks of {block_size}"
