"""The prefix tree for somebody who watches: how prompts begin alike, and how often that saved computing them.

Made by `view.py` with the first watcher. Branches are told apart by the content hashes of the prefix cache, which never
leave this file: what is shown has random numbers and counts. Knows no tokens.
"""

import secrets
from typing import Any

import msgspec

from quire.kv.manager import KVManager

MAX_NODES = 200
MAX_DEPTH = 1024  # blocks of a prompt that are looked at
KEY_BYTES = 8  # of a block's hash, enough to tell blocks apart here
ENCODED_FOR = 4  # updates
COLUMNS = ("id", "parent", "tokens", "requests", "hits", "hit_tokens", "cached")


class Node:
    """A run of blocks that all prompts which have its first have to its end, as far as they are known."""

    __slots__ = ("number", "parent", "children", "start", "key", "end_hash", "requests", "hits", "hit_blocks", "used")

    def __init__(self, number: int, parent: "Node | None", start: int, key: bytes, end_hash: bytes) -> None:
        self.number = number
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # by the first block's part of their key
        self.start = start  # blocks before it
        self.key = key  # KEY_BYTES per block
        self.end_hash = end_hash  # of its last block
        self.requests = 0
        self.hits = 0
        self.hit_blocks = 0
        self.used = 0  # number of the last insertion that went through it

    @property
    def num_blocks(self) -> int:
        return len(self.key) // KEY_BYTES


class PrefixTree:
    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.block_tokens = max(kv.block_sizes)
        self.group_idx = kv.block_sizes.index(self.block_tokens)
        self.root = Node(0, None, 0, b"", b"")
        self.nodes: dict[int, Node] = {}
        self.num_inserted = 0
        self._encoded: msgspec.Raw | None = None
        self._age = 0

    def insert(self, hashes: list[bytes], num_hit: int) -> None:
        """A prompt's blocks, the first `num_hit` of which were found in the cache."""
        hashes = hashes[:MAX_DEPTH]
        keys = b"".join([content_hash[:KEY_BYTES] for content_hash in hashes])
        self.num_inserted += 1
        node, depth = self.root, 0
        while depth < len(hashes):
            rest = keys[depth * KEY_BYTES :]
            child = node.children.get(rest[:KEY_BYTES])
            if child is None:
                # What was found ends a node of its own: others may share it.
                end = num_hit if depth < num_hit < len(hashes) else len(hashes)
                child = self._add(node, depth, rest[: (end - depth) * KEY_BYTES], hashes[end - 1])
            elif (num_common := _common_blocks(child.key, rest)) < child.num_blocks:
                child = self._split(child, num_common, hashes[depth + num_common - 1])
            child.requests += 1
            child.used = self.num_inserted
            if num_hit > depth:
                child.hits += 1
                child.hit_blocks += min(num_hit - depth, child.num_blocks)
            depth += child.num_blocks
            node = child
        while len(self.nodes) > MAX_NODES:
            self._drop_oldest()

    def _add(self, parent: Node, start: int, key: bytes, end_hash: bytes) -> Node:
        number = secrets.randbelow(999) + 1
        while number in self.nodes:
            number = secrets.randbelow(999) + 1
        node = self.nodes[number] = parent.children[key[:KEY_BYTES]] = Node(number, parent, start, key, end_hash)
        return node

    def _split(self, node: Node, num_blocks: int, end_hash: bytes) -> Node:
        """Cuts a node after `num_blocks`; returns the upper part, which is new."""
        parent = node.parent or self.root
        upper = self._add(parent, node.start, node.key[: num_blocks * KEY_BYTES], end_hash)
        upper.requests, upper.hits = node.requests, node.hits
        # How much of each part was hit is known where all hits took all of it; else it was mostly the beginning.
        upper.hit_blocks = min(node.hit_blocks, node.hits * num_blocks)
        node.hit_blocks -= upper.hit_blocks
        node.hits = min(node.hits, -(-node.hit_blocks // max(1, node.num_blocks - num_blocks)))
        node.key = node.key[num_blocks * KEY_BYTES :]
        node.start += num_blocks
        node.parent = upper
        upper.children[node.key[:KEY_BYTES]] = node
        return upper

    def _drop_oldest(self) -> None:
        oldest = min((node for node in self.nodes.values() if not node.children), key=lambda node: node.used)
        del self.nodes[oldest.number]
        parent = oldest.parent or self.root
        del parent.children[oldest.key[:KEY_BYTES]]

    def shown(self, max_nodes: int = MAX_NODES) -> msgspec.Raw:
        """Encoded anew every few updates."""
        self._age += 1
        if self._encoded is None or self._age >= ENCODED_FOR:
            self._age = 0
            nodes = self._rows()[:max_nodes]
            shown: dict[str, Any] = {"enabled": self.kv.prefix_caching, "columns": COLUMNS, "nodes": nodes}
            self._encoded = msgspec.Raw(msgspec.json.encode(shown))
        return self._encoded

    def forget_encoded(self) -> None:
        self._encoded = None

    def _rows(self) -> list[tuple[int, ...]]:
        """Parents before their children, and level by level, so that what is cut off at the end is deep."""
        cached = self.kv.pool_of[self.group_idx].cached
        size, group_idx = self.block_tokens, self.group_idx
        rows: list[tuple[int, ...]] = []
        level = [self.root]
        while level:
            level = [child for node in level for child in node.children.values()]
            for node in level:
                parent = node.parent.number if node.parent is not None else 0
                counts = node.num_blocks * size, node.requests, node.hits, node.hit_blocks * size
                rows.append((node.number, parent, *counts, int((group_idx, node.end_hash) in cached)))
        return rows


def _common_blocks(a: bytes, b: bytes) -> int:
    """How many blocks two keys have in common at their beginning."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // KEY_BYTES
    low, high = 0, length // KEY_BYTES  # in common: at least `low`, fewer than `high`
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * KEY_BYTES] == b[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle
    return low
