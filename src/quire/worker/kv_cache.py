"""The KV cache's memory: planes of blocks, and each attention layer's view into its plane.

Called by the worker once the number of blocks is known. Which block holds what is `kv/`'s business.
"""

import mmap

import torch
from torch import Tensor, nn

from quire.kv.specs import KVLayout, KVSpec
from quire.layers.attention import CacheLayer


def kv_specs(model: nn.Module, dtype: torch.dtype) -> dict[str, KVSpec]:
    layers = {name: m for name, m in model.named_modules() if isinstance(m, CacheLayer)}
    return {name: layer.kv_spec(dtype.itemsize) for name, layer in layers.items() if layer.shares is None}


def attach_kv(model: nn.Module, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Gives every layer with a cache its group and its cache, [num_blocks, *what its spec says]."""
    shape = layout.num_blocks, layout.plane_bytes
    on_host = device.type == "cpu"
    planes = [_zero_pages(*shape) if on_host else torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layout.num_planes)]
    for group_idx, group in enumerate(layout.groups):
        for plane, name in zip(planes, group.layers):
            layer = model.get_submodule(name)
            layer.group_idx = group_idx
            layer.cache = _view(plane, group.block_size, group.spec, dtype)
    for layer in model.modules():
        if isinstance(layer, CacheLayer) and layer.shares is not None:
            owner = model.get_submodule(layer.shares)
            layer.group_idx, layer.cache, layer.backend = owner.group_idx, owner.cache, owner.backend


def _zero_pages(num_blocks: int, block_bytes: int) -> Tensor:
    """Zero pages straight from the system, in huge pages where it has them: blocks never used cost nothing."""
    pages = mmap.mmap(-1, num_blocks * block_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(num_blocks, block_bytes)


def _view(plane: Tensor, block_size: int, spec: KVSpec, dtype: torch.dtype) -> Tensor:
    used = plane[:, : block_size * spec.bytes_per_token]  # the rest of a plane pads groups to equal bytes
    return used.view(dtype).unflatten(1, spec.shape(block_size))
