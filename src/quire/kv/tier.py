"""Where blocks are kept that a pool forgets: the contract of every tier, and the one that keeps nothing.

Asked by `kv/manager.py`, which plans the copies (`Move`); the worker carries them out. Knows content hashes and places, not
tensors.
"""


class NoTier:
    num_places = 0  # in each pool
    max_step_bytes = 0  # that one step may copy, in both directions together

    def keep(self, pool_idx: int, group_idx: int, content_hash: bytes, loaded: set[tuple[int, int]]) -> int | None:
        """The place that gets the content a block is about to lose; None: it is lost. What was in that place is forgotten, so it
        must not be one of `loaded` (pool, place), from which the same step loads."""
        return None

    def find(self, pool_idx: int, group_idx: int, content_hash: bytes) -> int | None:
        """The place that has this content."""
        return None
