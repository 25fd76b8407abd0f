"""What a core tells of its prefix cache where a frontend chooses among several cores: which blocks came, which went.

Filled by `kv/manager.py`, taken by the engine after each step. A block is told once, by its latest state, so that no
order is lost and one that came and went between two steps costs eight bytes. Knows digests, not tokens.
"""

from quire.kv.prefix import DIGEST_BYTES

MAX_DIGESTS = 8192  # told at once: the rest comes with the next steps


class PrefixNews:
    def __init__(self) -> None:
        self.is_reset = False  # what was told before is to be forgotten
        self._changes: dict[bytes, bool] = {}  # digest -> whether it is cached now; the oldest first

    def __len__(self) -> int:
        return len(self._changes) + self.is_reset

    def came(self, content_hash: bytes) -> None:
        self._changes[content_hash[:DIGEST_BYTES]] = True

    def went(self, content_hash: bytes) -> None:
        self._changes[content_hash[:DIGEST_BYTES]] = False

    def reset(self) -> None:
        self._changes.clear()
        self.is_reset = True

    def take(self) -> tuple[bool, bytes, bytes]:
        """(whether all before is forgotten, digests that came, digests that went), `MAX_DIGESTS` at most."""
        is_reset, self.is_reset = self.is_reset, False
        changes = self._changes
        told = list(changes)[:MAX_DIGESTS] if len(changes) > MAX_DIGESTS else list(changes)
        states = [(digest, changes.pop(digest)) for digest in told]
        came = b"".join(digest for digest, is_cached in states if is_cached)
        return is_reset, came, b"".join(digest for digest, is_cached in states if not is_cached)
