"""Latent attention in plain torch."""

import torch

from quire.layers.attention.base import CpuBackend
from quire.ops.mla import reference as mla


class LatentReference(CpuBackend):
    norm_rope_and_write = staticmethod(mla.norm_rope_and_write)
    head_linear = staticmethod(mla.head_linear)
    latent_attention = staticmethod(mla.latent_attention)


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    latent_size: int,
    rope_size: int,
    block_size: int,
    cache_dtype: torch.dtype,
) -> str | None:
    return None


BACKEND = LatentReference
