"""Plain torch: any dtype, head size and block size."""

from quire.ops.ref.attention import paged_attention
from quire.ops.ref.elementwise import rope_and_write

__all__ = ["paged_attention", "rope_and_write", "supports"]


def supports(dtype: object, head_size: int, block_size: int) -> bool:
    return True
