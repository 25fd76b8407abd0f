"""The KV cache's memory: planes of blocks in each pool, each layer's views into them, places outside of the device.

Made by the worker once the number of blocks is known. `kv/` decides which block holds what.
"""

import mmap
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from quire.kv.specs import CacheSpec, Group, KVLayout, PoolLayout
from quire.layers.attention import CacheLayer
from quire.ops.transfer import to_device
from quire.step import Move


def cache_layers(model: nn.Module, prefix: str = "") -> dict[str, CacheLayer]:
    """By path, with a prefix."""
    return {prefix + path: module for path, module in model.named_modules() if isinstance(module, CacheLayer)}


def kv_specs(model: nn.Module, cache_dtype: torch.dtype, prefix: str = "") -> dict[str, CacheSpec]:
    """The specs of all caches, by "path of the layer:name of the cache"."""
    specs: dict[str, CacheSpec] = {}
    for path, layer in cache_layers(model, prefix).items():
        if layer.shares is None:
            named = layer.cache_specs(str(cache_dtype).removeprefix("torch."))
            specs |= {f"{path}:{name}": spec for name, spec in named.items()}
    return specs


class KVMemory:
    def __init__(
        self, layout: KVLayout, device: torch.device, copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    ) -> None:
        self.groups = layout.groups
        self.device = device
        self.copy_blocks = copy_blocks
        self.planes = [_planes(pool, device) for pool in layout.pools]
        self.outside = [_outside_planes(pool, device) for pool in layout.pools]

    def attach(self, model: nn.Module, prefix: str = "") -> None:
        """Gives every layer its caches, and the index of the group whose block table they use.

        `prefix`: of the model's layers in the names of caches.
        """
        layers = cache_layers(model, prefix)
        for group_idx, group in enumerate(self.groups):
            for plane, cache in zip(self.planes[group.pool_idx], group.caches):
                path, _, name = cache.partition(":")
                if path in layers:
                    layers[path].attach_cache(name, group_idx, _parts(plane, group))
        for layer in layers.values():
            if layer.shares is not None:
                owner = layers[prefix + layer.shares]
                layer.group_idx = owner.group_idx
                layer.cache, layer.scales = owner.cache, owner.scales

    def move(self, moves: Sequence[Move]) -> None:
        """Copies blocks to places outside of the device and back, in order, without waiting."""
        for (pool_idx, is_load, _), run in groupby(_numbered_runs(moves), key=lambda numbered: numbered[0]):
            pairs = [(move.place, move.block) if is_load else (move.block, move.place) for _, move in run]
            pairs_P2 = to_device(np.array(pairs, np.int32), self.device)
            for plane, outside in zip(self.planes[pool_idx], self.outside[pool_idx]):
                source, target = (outside, plane) if is_load else (plane, outside)
                self.copy_blocks(source, target, pairs_P2)


def _numbered_runs(moves: Sequence[Move]) -> list[tuple[tuple[int, bool, int], Move]]:
    """Each move with its (pool, direction, number of the run).

    A run is copied at once: its moves have one direction, and no block or place occurs twice.
    """
    numbered = []
    run = 0
    last_kind: tuple[int, bool] | None = None
    seen: set[tuple[str, int]] = set()  # blocks and places of the run
    for move in moves:
        kind = move.pool_idx, move.is_load
        touched = {("block", move.block), ("place", move.place)}
        if kind != last_kind or seen & touched:
            run += 1
            last_kind = kind
            seen = set()
        seen |= touched
        numbered.append(((*kind, run), move))
    return numbered


def _planes(pool: PoolLayout, device: torch.device) -> list[Tensor]:
    shape = pool.num_blocks, pool.plane_bytes
    if device.type == "cpu":
        return [_zero_pages(*shape) for _ in range(pool.num_planes)]
    return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(pool.num_planes)]


def _outside_planes(pool: PoolLayout, device: torch.device) -> list[Tensor]:
    """In the host's memory; pinned for a GPU, so that its kernels can access them."""
    if not pool.num_places:
        return []
    shape = pool.num_places, pool.plane_bytes
    is_pinned = device.type != "cpu"
    return [torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(pool.num_planes)]


def _zero_pages(num_blocks: int, block_bytes: int) -> Tensor:
    """Zeroed pages directly from the system, huge ones if it has them: blocks never used take no memory."""
    pages = mmap.mmap(-1, num_blocks * block_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(num_blocks, block_bytes)


def _parts(plane: Tensor, group: Group) -> dict[str, Tensor]:
    """Views of a plane, [num_blocks, entries of a block, *shape of an entry].

    The unused end of a block is padding, which makes blocks of all groups equally large.
    """
    num_entries = group.block_size // group.spec.tokens_per_entry
    parts = {}
    first = 0
    for part in group.spec.parts:
        size = num_entries * part.entry_bytes
        values = plane[:, first : first + size].view(getattr(torch, part.dtype))
        parts[part.name] = values.unflatten(1, (num_entries, *part.shape))
        first += size
    return parts
