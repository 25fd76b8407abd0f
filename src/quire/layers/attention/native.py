"""Compiled for this CPU: float32 and bfloat16, head sizes and block sizes in multiples of 16."""

from quire.ops.cpu.attention import paged_attention
from quire.ops.cpu.attention import supported as supports
from quire.ops.cpu.elementwise import rope_and_write

__all__ = ["paged_attention", "rope_and_write", "supports"]
