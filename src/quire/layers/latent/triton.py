"""Latent attention with Triton kernels, for NVIDIA GPUs."""

import torch

from quire.layers.attention import CacheLayer
from quire.layers.attention._work_lists import WorkListBackend
from quire.ops.attention.triton_codes import why_no_codes
from quire.ops.attention.work import WorkShape
from quire.ops.mla import triton as mla


class LatentTriton(WorkListBackend):
    norm_rope_and_write = staticmethod(mla.norm_rope_and_write)
    head_linear = staticmethod(mla.head_linear)
    latent_attention = staticmethod(mla.latent_attention)

    @staticmethod
    def work_shape(layer: CacheLayer, dtype: torch.dtype, *, decode: bool) -> WorkShape:
        return mla.work_shape(dtype, layer.num_heads, layer.latent_size, decode=decode)


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    latent_size: int,
    rope_size: int,
    block_size: int,
    cache_dtype: torch.dtype,
) -> str | None:
    if mla.supports(dtype, latent_size, rope_size, block_size):
        return why_no_codes(cache_dtype)
    return f"it has no kernel for {dtype}, latents of {latent_size} + {rope_size} values and blocks of {block_size}"


BACKEND = LatentTriton
