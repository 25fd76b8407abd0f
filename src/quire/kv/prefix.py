"""Content hashes: block i of a prompt is identified by a SHA-256, chained over its tokens and all tokens before them.

Called by `kv/manager.py`. The chain's root holds everything else that the content depends on (the salt, later adapters
and media), so equal hashes mean equal KV, and a request with a salt shares blocks only with requests of the same salt.
"""

import hashlib
from array import array


def root_hash(salt: str) -> bytes:
    return hashlib.sha256(b"quire-kv-v1\0" + salt.encode("utf-8", "surrogatepass")).digest()


class HashChain:
    """Hashes of a request's full blocks for one block size, extended as its tokens grow."""

    __slots__ = ("block_size", "hashes", "_last")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._last = root

    def upto(self, tokens: list[int], num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` hashes; `tokens` must hold that many full blocks."""
        for idx in range(len(self.hashes), num_blocks):
            chunk = array("i", tokens[idx * self.block_size : (idx + 1) * self.block_size])
            self._last = hashlib.sha256(self._last + chunk.tobytes()).digest()
            self.hashes.append(self._last)
        return self.hashes
