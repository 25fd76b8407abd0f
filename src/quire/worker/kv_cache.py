"""The KV cache's memory: planes of blocks, and each attention layer's view into its plane.

Called by the worker once the number of blocks is known. Which block holds what is `kv/`'s business.
"""

import numpy as np
import torch
from torch import Tensor, nn

from quire.kv.specs import KVLayout, KVSpec
from quire.layers.attention import Attention


def kv_specs(model: nn.Module, dtype: torch.dtype) -> dict[str, KVSpec]:
    return {name: m.kv_spec(dtype.itemsize) for name, m in model.named_modules() if isinstance(m, Attention)}


def attach_kv(model: nn.Module, layout: KVLayout, dtype: torch.dtype) -> None:
    """Gives every attention layer its group and its cache [num_blocks, 2, block_size, kv heads, head size]."""
    # numpy takes zero pages from the system without touching them: blocks never used cost nothing.
    planes = [torch.from_numpy(np.zeros((layout.num_blocks, layout.plane_bytes), np.uint8)) for _ in range(layout.num_planes)]
    for group_idx, group in enumerate(layout.groups):
        for plane, name in zip(planes, group.layers):
            layer = model.get_submodule(name)
            layer.group_idx = group_idx
            layer.cache = _view(plane, group.block_size, group.spec, dtype)


def _view(plane: Tensor, block_size: int, spec: KVSpec, dtype: torch.dtype) -> Tensor:
    used = plane[:, : block_size * spec.bytes_per_token]  # the rest of a plane pads groups to equal bytes
    return used.view(dtype).unflatten(1, (2, block_size, spec.num_kv_heads, spec.head_size))
