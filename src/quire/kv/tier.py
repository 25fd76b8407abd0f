"""A tier keeps blocks that a pool evicts, outside of the device. Here is the contract, and a tier that keeps nothing.

Called by `kv/manager.py`, which plans the copies (`Move`); the worker carries them out. Knows content hashes and
places, not tensors.
"""


class NoTier:
    num_places = 0  # for blocks of each pool
    max_step_bytes = 0  # bytes that one step may copy, in both directions together

    def keep(self, pool_idx: int, group_idx: int, content_hash: bytes, loaded: set[tuple[int, int]]) -> int | None:
        """The place to which the content of a block that is about to be evicted is copied; None: it is not kept.

        The place's old content is overwritten, so it must not be one of `loaded`, the (pool, place) pairs that the
        same step loads from.
        """
        return None

    def forget_all(self) -> None:
        """No content can be found any more."""

    def find(self, pool_idx: int, group_idx: int, content_hash: bytes) -> int | None:
        """The place that has this content."""
        return None
