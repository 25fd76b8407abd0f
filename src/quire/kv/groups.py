"""From the specs of a model's caches to groups of equal block bytes, and to numbers of blocks.

Called once at start by the engine. Equal specs form a group; a spec with many layers is split into several groups, and
a group with few layers leaves planes unused, so that every group's block has the same number of bytes and all groups
share one pool. States have pools of their own.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from quire.errors import CapacityError, ConfigError
from quire.kv.specs import CacheSpec, Group, KVLayout, PoolLayout

# Share of a request's memory that padding and unused planes may take, for a short request and a long one. The limit for
# long ones is stricter, because they are what memory runs out for.
SHORT_TOKENS, MAX_UNUSED = 2_048, 0.10
LONG_TOKENS, MAX_UNUSED_OF_LONG = 131_072, 0.05
MAX_GROUPS = 16  # each has a block table, which a step reads and extends
NO_LIMIT = 1 << 31  # blocks of a pool of which a worker has no cache
STATE_BLOCKS_PER_ROW = 4  # held by a running request, and cached of others


def form_layout(specs: dict[str, CacheSpec], block_size: int, num_blocks: int = 0) -> KVLayout:
    """Groups for `specs` (name of the cache -> spec); `block_size` is that of the spec with the most bytes per token.

    `num_blocks`: of each pool.
    """
    if not specs:
        raise ConfigError("the model has no layer with a KV cache")
    caches_of: dict[CacheSpec, list[str]] = {}
    for cache, spec in specs.items():
        caches_of.setdefault(spec, []).append(cache)
    shared = {spec: caches for spec, caches in caches_of.items() if not spec.is_state}
    groups: list[Group] = []
    pools: list[PoolLayout] = []
    if shared:
        num_planes, sizes = _choose_planes(shared, block_size)
        plane_bytes = max(spec.block_bytes(size) for spec, size in sizes.items())
        pools.append(PoolLayout(num_planes, plane_bytes, num_blocks))
        for spec, caches in shared.items():
            starts = range(0, len(caches), num_planes)
            groups += [Group(spec, sizes[spec], tuple(caches[start : start + num_planes])) for start in starts]
    for spec, caches in caches_of.items():
        if spec.is_state:
            groups.append(Group(spec, spec.tokens_per_entry, tuple(caches), pool_idx=len(pools)))
            pools.append(PoolLayout(len(caches), spec.entry_bytes, num_blocks))
    return KVLayout(tuple(groups), tuple(pools))


def _choose_planes(caches_of: dict[CacheSpec, list[str]], block_size: int) -> tuple[int, dict[CacheSpec, int]]:
    """How many planes a block has, and how many tokens a block of each spec holds."""
    units = {spec: math.lcm(block_size, spec.tokens_per_entry) for spec in caches_of}
    plane_bytes = max(spec.block_bytes(unit) for spec, unit in units.items())
    sizes = {spec: unit * _multiple(plane_bytes / spec.block_bytes(unit)) for spec, unit in units.items()}
    counts = {spec: len(caches) for spec, caches in caches_of.items()}

    def num_groups(num_planes: int) -> int:
        return sum(-(-count // num_planes) for count in counts.values())

    def unused(num_planes: int, num_tokens: int) -> float:
        """Share of a request's memory that holds nothing."""
        needed = held = 0.0
        for spec, count in counts.items():
            tokens = min(num_tokens, spec.window or num_tokens)
            needed += count * tokens * spec.bytes_per_token
            held += -(-count // num_planes) * num_planes * plane_bytes * tokens / sizes[spec]
        return 1 - needed / held

    choices = [
        _PlaneChoice(num_groups(planes), unused(planes, LONG_TOKENS), unused(planes, SHORT_TOKENS), planes)
        for planes in range(1, max(counts.values()) + 1)
    ]
    choices = [choice for choice in choices if choice.num_groups <= MAX_GROUPS] or [min(choices)]
    for max_of_long in (MAX_UNUSED_OF_LONG, MAX_UNUSED):
        good = [
            choice
            for choice in choices
            if choice.unused_of_long <= max_of_long + 1e-9 and choice.unused_of_short <= MAX_UNUSED + 1e-9
        ]
        if good:
            return min(good).num_planes, sizes
    least_unused = min(choices, key=lambda choice: (choice.unused_of_long + choice.unused_of_short, choice))
    return least_unused.num_planes, sizes


class _PlaneChoice(NamedTuple):
    """A number of planes, and what follows from it; smaller is better, the first field first."""

    num_groups: int
    unused_of_long: float
    unused_of_short: float
    num_planes: int


def _multiple(ratio: float) -> int:
    """How many times a small spec's block fits into a plane.

    A power of two, so that blocks of all groups often end at the same token, unless that wastes too much.
    """
    power = 1 << int(math.log2(ratio + 1e-9))
    return power if power >= (1 - MAX_UNUSED) * ratio else int(ratio + 1e-9)


def narrowed(layout: KVLayout, specs: dict[str, CacheSpec]) -> KVLayout:
    """What a worker allocates that has only some of the caches, or only some heads of them (`specs`).

    Groups stay the same, so that block tables mean the same to all workers; some may have no cache here.
    """
    groups = []
    for group in layout.groups:
        caches = tuple(cache for cache in group.caches if cache in specs)
        groups.append(msgspec.structs.replace(group, caches=caches, spec=specs[caches[0]] if caches else group.spec))
    pools = []
    for idx, pool in enumerate(layout.pools):
        own = [group for group in groups if group.pool_idx == idx and group.caches]
        num_planes = max((len(group.caches) for group in own), default=0)
        plane_bytes = max((group.spec.block_bytes(group.block_size) for group in own), default=0)
        pools.append(msgspec.structs.replace(pool, num_planes=num_planes, plane_bytes=plane_bytes))
    return KVLayout(tuple(groups), tuple(pools))


def num_blocks_for(layout: KVLayout, memory_bytes: int, num_rows: int) -> list[int]:
    """Blocks of each pool.

    Pools of states get what `num_rows` requests need, together half of the memory at most; the shared pool gets the
    rest.
    """
    state_pools = {group.pool_idx for group in layout.groups if group.spec.is_state}
    state_bytes = sum(layout.pools[idx].block_bytes for idx in state_pools)  # of one block in each of them
    num_state_blocks = num_rows * STATE_BLOCKS_PER_ROW + 1
    if num_state_blocks * state_bytes > memory_bytes // 2:
        num_state_blocks = memory_bytes // 2 // state_bytes
    remaining = memory_bytes - num_state_blocks * state_bytes
    return [
        num_state_blocks if idx in state_pools else remaining // pool.block_bytes if pool.block_bytes else NO_LIMIT
        for idx, pool in enumerate(layout.pools)
    ]


def with_blocks(layout: KVLayout, num_blocks: Iterable[int], num_places: int = 0) -> KVLayout:
    """`num_places`: for blocks that are kept outside of the device, in each pool."""
    pools = [
        msgspec.structs.replace(pool, num_blocks=count, num_places=num_places)
        for pool, count in zip(layout.pools, num_blocks, strict=True)
    ]
    return msgspec.structs.replace(layout, pools=tuple(pools))


def check_capacity(layout: KVLayout, max_model_len: int, chunk_tokens: int) -> None:
    """Raises unless one request of max_model_len fits: it could never run."""
    if _fits(layout, max_model_len, chunk_tokens):
        return
    low, high = 0, max_model_len
    while low < high:  # the longest request that would fit
        middle = (low + high + 1) // 2
        if _fits(layout, middle, chunk_tokens):
            low = middle
        else:
            high = middle - 1
    needed = _blocks_needed(layout, max_model_len, chunk_tokens)
    needed_bytes = sum(count * pool.block_bytes for count, pool in zip(needed, layout.pools))
    usable_bytes = sum(max(0, pool.num_blocks - 1) * pool.block_bytes for pool in layout.pools)
    shorter = f"lower --max-model-len to {low} or " if low > 0 else ""
    raise CapacityError(
        f"one request of max_model_len {max_model_len} needs {needed_bytes / 2**30:.2f} GiB of KV cache, "
        f"there are {usable_bytes / 2**30:.2f} GiB: "
        f"{shorter}raise --kv-cache-memory-bytes or --gpu-memory-utilization"
    )


def _fits(layout: KVLayout, num_tokens: int, chunk_tokens: int) -> bool:
    needed = _blocks_needed(layout, num_tokens, chunk_tokens)
    return all(count <= pool.num_blocks - 1 for count, pool in zip(needed, layout.pools))  # block 0 is not usable


def _blocks_needed(layout: KVLayout, num_tokens: int, chunk_tokens: int) -> list[int]:
    """Blocks of each pool that one request holds, at most."""
    needed = [0] * len(layout.pools)
    for group in layout.groups:
        needed[group.pool_idx] += group.spec.most_blocks(num_tokens, chunk_tokens, group.block_size)
    return needed
