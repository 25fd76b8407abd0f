"""What a layer caches, as data: the one piece of the KV cache that core and worker share.

A layer returns its caches by name, each with a CacheSpec; `kv/` turns them into groups and block counts, and the worker
into tensors. A spec says what an entry holds, how many tokens it covers and how long it is needed; prefix hits, forks
and the freeing of blocks follow from that. Must not know torch, models or requests.
"""

import math

import msgspec

DTYPE_BYTES = {
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
}
ROUNDED = ("float8_e4m3fn", "int8")  # values of these types are codes, of which each vector has a scale


class EntryPart(msgspec.Struct, frozen=True):
    """One tensor of a cache: what it holds of each entry. In a block, all entries of the first part come first."""

    name: str
    dtype: str  # torch's name for it
    shape: tuple[int, ...]

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class CacheSpec(msgspec.Struct, frozen=True):
    """The contents of a cache (parts, tokens per entry) and what is needed of it (all tokens, a window, or a state).

    A state is one entry per block: the layer's state after the block's last computed token, overwritten by each step.
    A full block keeps the state at its end, from which another request may resume.
    """

    kind: str  # the usual name, for people
    parts: tuple[EntryPart, ...]
    tokens_per_entry: int = 1
    window: int = 0  # how many of the last tokens are needed, a query's own included; 0: all tokens
    is_state: bool = False

    @property
    def entry_bytes(self) -> int:
        return sum(part.entry_bytes for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """By how much a token makes the cache of a long request grow."""
        return 0 if self.is_state else self.entry_bytes / self.tokens_per_entry

    def block_bytes(self, block_size: int) -> int:
        """Of a block for `block_size` tokens, a multiple of `tokens_per_entry`."""
        return block_size // self.tokens_per_entry * self.entry_bytes

    def first_needed(self, position: int) -> int:
        """The earliest token whose entry a query at `position`, or later, still reads."""
        if self.is_state:
            return max(0, position - 1)
        return max(0, position - self.window + 1) if self.window else 0

    def needed_blocks(self, num_tokens: int, block_size: int) -> range:
        """The blocks that the next query of a request with `num_tokens` computed tokens reads."""
        return range(self.first_needed(num_tokens) // block_size, -(-num_tokens // block_size))

    def written_blocks(self, num_before: int, num_after: int, resume_blocks: int) -> list[int]:
        """Of blocks `num_before` to `num_after`, those that steps write to; the others may stay empty.

        Of a state only the last block is written, and the last block before it at whose end requests may resume: that
        is one in every `resume_blocks`.
        """
        new = range(num_before, num_after)
        if not self.is_state:
            return list(new)
        newest_resumable = (num_after - 1) // resume_blocks * resume_blocks - 1
        return [idx for idx in new if idx in (newest_resumable, num_after - 1)]

    def most_blocks(self, num_tokens: int, chunk_tokens: int, block_size: int) -> int:
        """How many blocks one request of `num_tokens` holds at once, at most, in steps of `chunk_tokens`."""
        blocks = -(-num_tokens // block_size)
        if self.is_state:
            # The state before a step, the state after it, one where requests may resume, and one for a fork.
            return min(blocks, 4)
        if self.window:  # the window before the chunk, the chunk itself, and one block on either side for alignment
            return min(blocks, -(-(self.window + chunk_tokens) // block_size) + 2)
        return blocks


def Full(num_kv_heads: int, head_size: int, dtype: str) -> CacheSpec:
    """Keys and values of every token."""
    return CacheSpec("full", _keys_and_values(num_kv_heads, head_size, dtype))


def Sliding(num_kv_heads: int, head_size: int, dtype: str, window: int) -> CacheSpec:
    """Keys and values of the last `window` tokens, the query's own included."""
    return CacheSpec("sliding", _keys_and_values(num_kv_heads, head_size, dtype), window=window)


def Latent(latent_size: int, rope_size: int, dtype: str) -> CacheSpec:
    """One vector of every token, from which keys and values of all heads are computed, and a rotated part of keys."""
    return CacheSpec("latent", (EntryPart("latent", dtype, (latent_size + rope_size,)), *_scales(dtype, 2)))


def State(parts: tuple[EntryPart, ...], every: int) -> CacheSpec:
    """A state that summarizes all tokens so far; one for other requests is kept every `every` tokens."""
    return CacheSpec("state", parts, tokens_per_entry=every, is_state=True)


def _keys_and_values(num_kv_heads: int, head_size: int, dtype: str) -> tuple[EntryPart, ...]:
    shape = num_kv_heads, head_size
    return EntryPart("keys", dtype, shape), EntryPart("values", dtype, shape), *_scales(dtype, 2, num_kv_heads)


def _scales(dtype: str, *shape: int) -> tuple[EntryPart, ...]:
    """Of keys and of values, or of the latent and of its rotated part."""
    return (EntryPart("scales", "float32", shape),) if dtype in ROUNDED else ()


class Group(msgspec.Struct, frozen=True):
    """Caches with equal specs, which share one block table: a block of the group holds entries of all of them."""

    spec: CacheSpec
    block_size: int  # tokens per block
    caches: tuple[str, ...]  # "path of the layer:name of the cache"
    pool_idx: int = 0


class PoolLayout(msgspec.Struct, frozen=True):
    """Memory that groups share: `num_planes` tensors of `num_blocks` x `plane_bytes`.

    Cache i of every group lies in plane i, so a block id means the same bytes whichever group uses it.
    """

    num_planes: int
    plane_bytes: int  # of one block in one plane
    num_blocks: int = 0
    num_places: int = 0  # for blocks that are kept outside of the device, in the host's memory

    @property
    def block_bytes(self) -> int:
        return self.num_planes * self.plane_bytes


class KVLayout(msgspec.Struct, frozen=True):
    """What the worker allocates."""

    groups: tuple[Group, ...]
    pools: tuple[PoolLayout, ...]  # the first is shared by all groups but states, each of which has a pool of its own

    @property
    def total_bytes(self) -> int:
        return sum(pool.num_blocks * pool.block_bytes for pool in self.pools)
