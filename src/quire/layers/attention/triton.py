"""Triton kernels for NVIDIA GPUs: float32 and 16-bit floats, head sizes to 512 in steps of 8, blocks of 16 and up."""

import torch

from quire.layers.attention import CacheLayer
from quire.layers.attention._work_lists import WorkListBackend
from quire.ops.attention.triton import paged_attention, supports, work_shape
from quire.ops.attention.triton_codes import why_no_codes
from quire.ops.attention.work import WorkShape
from quire.ops.elementwise.triton_rope import rope_and_write


class Triton(WorkListBackend):
    rope_and_write = staticmethod(rope_and_write)
    paged_attention = staticmethod(paged_attention)

    @staticmethod
    def work_shape(layer: CacheLayer, dtype: torch.dtype, *, decode: bool) -> WorkShape:
        sizes = layer.num_heads, layer.num_kv_heads, layer.head_size
        return work_shape(dtype, *sizes, decode=decode, has_codes=layer.scales is not None)


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, cache_dtype: torch.dtype
) -> str | None:
    if cache_dtype != dtype and block_size % 16:
        return "it reads 8-bit caches in blocks of 16 tokens, or multiples of it: change --block-size"
    if supports(dtype, head_size, block_size):
        return why_no_codes(cache_dtype)
    return f"it has no kernel for {dtype}, head size {head_size} and blocks of {block_size}"


BACKEND = Triton
