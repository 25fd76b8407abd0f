"""From the specs of a model's layers to groups of equal block size, and to a number of blocks.

Called once at start by the engine. Equal specs form a group; a spec with more layers than the rarest one is split, and short
groups leave planes unused, so that every group's block has the same bytes and all draw from one pool.
"""

import math

from quire.errors import CapacityError, ConfigError
from quire.kv.specs import Group, KVLayout, KVSpec, Sliding


def form_layout(specs: dict[str, KVSpec], block_size: int, num_blocks: int) -> KVLayout:
    """Groups for `specs` (layer name -> spec); `block_size` is that of the spec with the most bytes per token."""
    layers_of: dict[KVSpec, list[str]] = {}
    for layer, spec in specs.items():
        layers_of.setdefault(spec, []).append(layer)
    if not layers_of:
        raise ConfigError("the model has no layer with a KV cache")
    plane_bytes = block_size * max(spec.bytes_per_token for spec in layers_of)
    num_planes = min(len(layers) for layers in layers_of.values())
    groups = []
    for spec, layers in layers_of.items():
        # A spec with fewer bytes per token gets more tokens into the same bytes.
        tokens = block_size * (plane_bytes // (block_size * spec.bytes_per_token))
        for start in range(0, len(layers), num_planes):
            groups.append(Group(spec, tokens, tuple(layers[start : start + num_planes])))
    return KVLayout(tuple(groups), num_blocks, num_planes, plane_bytes)


def blocks_needed(group: Group, num_tokens: int, chunk_tokens: int) -> int:
    """Most blocks of this group that one request of `num_tokens` holds at once, in steps of `chunk_tokens`."""
    blocks = math.ceil(num_tokens / group.block_size)
    if isinstance(group.spec, Sliding):
        # Window behind the chunk, the chunk itself, and one block on either side for alignment.
        live = math.ceil((group.spec.window + chunk_tokens) / group.block_size) + 2
        blocks = min(blocks, live + math.ceil(group.spec.sinks / group.block_size))
    return blocks


def num_blocks_for(layout: KVLayout, memory_bytes: int) -> int:
    return memory_bytes // layout.block_bytes


def check_capacity(layout: KVLayout, max_model_len: int, chunk_tokens: int) -> None:
    """One request of max_model_len must fit, or the engine could wait for ever."""
    needed = sum(blocks_needed(g, max_model_len, chunk_tokens) for g in layout.groups)
    usable = layout.num_blocks - 1  # block 0 is nobody's
    if needed <= usable:
        return
    low, high = 0, max_model_len
    while low < high:  # the longest request that would fit
        middle = (low + high + 1) // 2
        fits = sum(blocks_needed(g, middle, chunk_tokens) for g in layout.groups) <= usable
        low, high = (middle, high) if fits else (low, middle - 1)
    raise CapacityError(
        f"one request of max_model_len {max_model_len} needs {needed * layout.block_bytes / 2**30:.2f} GiB of KV cache, "
        f"there are {max(0, usable) * layout.block_bytes / 2**30:.2f} GiB: "
        + (f"lower --max-model-len to {low} or " if low > 0 else "")
        + "raise --kv-cache-memory-bytes or --gpu-memory-utilization"
    )
