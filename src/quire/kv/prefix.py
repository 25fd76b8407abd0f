"""Content hashes: block i of a prompt is identified by a SHA-256, chained over its tokens and all tokens before them.

Called by `kv/manager.py`, and by a frontend that chooses among several cores. The chain's root holds everything else
that the content depends on (the salt, later adapters and media), so equal hashes mean equal KV, and a request with a
salt shares blocks only with requests of the same salt.
"""

import hashlib
from array import array

DIGEST_BYTES = 8  # of a hash, where a mistake costs time only: a frontend guesses by them which core has a prefix


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


def prefix_digests(tokens: list[int], salt: str, block_size: int) -> list[int]:
    """A digest of each full block that a request with these tokens can find cached: never of the last token's."""
    num_blocks = (len(tokens) - 1) // block_size
    hashes = HashChain(root_hash(salt), block_size).upto(tokens, num_blocks)
    return digests(b"".join(content_hash[:DIGEST_BYTES] for content_hash in hashes))


def digests(joined: bytes) -> list[int]:
    """Digests that were sent one after the other."""
    return memoryview(joined).cast("Q").tolist()
