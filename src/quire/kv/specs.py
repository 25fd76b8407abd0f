"""What a layer caches, as data: the one piece of the KV cache both towers share.

A layer's `kv_spec()` returns one of these; `kv/` turns them into groups and block counts, and the worker into
tensors. A spec also says which past tokens a query still needs, which is all that prefix hits and block
freeing ever ask. Must not know torch, models or requests.
"""

import msgspec


class Full(msgspec.Struct, frozen=True, tag="full"):
    """Keys and values of every token."""

    num_kv_heads: int
    head_size: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.dtype_bytes

    def first_needed(self, position: int) -> int:
        """The earliest token, after any sinks, that a query at `position` or later still reads."""
        return 0

    def shape(self, block_size: int) -> tuple[int, ...]:
        """Of one block."""
        return 2, block_size, self.num_kv_heads, self.head_size

    @property
    def num_sinks(self) -> int:
        return 0


class Latent(msgspec.Struct, frozen=True, tag="latent"):
    """One vector of every token, from which keys and values of all heads are made."""

    latent_size: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return self.latent_size * self.dtype_bytes

    def first_needed(self, position: int) -> int:
        return 0

    def shape(self, block_size: int) -> tuple[int, ...]:
        return block_size, self.latent_size

    @property
    def num_sinks(self) -> int:
        return 0


class Sliding(msgspec.Struct, frozen=True, tag="sliding"):
    """Keys and values of the last `window` tokens (the query's own included) and of the first `sinks`."""

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    window: int
    sinks: int = 0

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * self.dtype_bytes

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def shape(self, block_size: int) -> tuple[int, ...]:
        return 2, block_size, self.num_kv_heads, self.head_size

    @property
    def num_sinks(self) -> int:
        return self.sinks


KVSpec = Full | Latent | Sliding


class Group(msgspec.Struct, frozen=True):
    """Layers that share one block table: equal specs, so a block of the group serves all of them."""

    spec: KVSpec
    block_size: int  # tokens per block
    layers: tuple[str, ...]


class KVLayout(msgspec.Struct, frozen=True):
    """What the worker allocates: `num_planes` tensors of `num_blocks` x `plane_bytes`.

    Layer i of every group lives in plane i, so a block id means the same bytes whichever group holds it.
    """

    groups: tuple[Group, ...]
    num_blocks: int
    num_planes: int
    plane_bytes: int  # of one block in one plane

    @property
    def block_bytes(self) -> int:
        return self.num_planes * self.plane_bytes
