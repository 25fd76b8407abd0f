"""Triton kernels for NVIDIA GPUs: float32 and 16-bit floats, head sizes to 512 in steps of 8, blocks of 16 and up."""

from quire.ops.attention import paged_attention, why_not, work_shape
from quire.ops.elementwise import rope_and_write
from quire.ops.fresh import fresh_attention

__all__ = ["fresh_attention", "paged_attention", "rope_and_write", "why_not", "work_shape"]
