"""The prefix tree for somebody who watches: how prompts begin alike, and how often that saved computing them.

Made by `view.py` with the first watcher. Branches are told apart by the content hashes of the prefix cache, which never
leave this file: what is shown has random numbers and counts. Knows no tokens.
"""

import bisect
import heapq
import secrets
from typing import Any

import msgspec

from quire.kv.manager import KVManager

MAX_NODES = 200
SLACK_NODES = 56  # that may be there besides, until it is next made smaller: dropping many at once costs less
MAX_DEPTH = 1024  # blocks of a prompt that are looked at
ENCODED_FOR = 4  # updates
COLUMNS = ("id", "parent", "tokens", "requests", "hits", "hit_tokens", "cached")


class Node:
    """A run of blocks that all prompts which have its first have to its end, as far as they are known."""

    __slots__ = ("number", "parent", "children", "hashes", "requests", "hits", "hit_blocks", "used")

    def __init__(self, number: int, parent: "Node | None", hashes: list[bytes]) -> None:
        self.number = number
        self.parent = parent or self  # the root's is itself
        self.children: dict[bytes, Node] = {}  # by the hash of their first block
        self.hashes = hashes  # of its blocks
        self.requests = 0
        self.hits = 0
        self.hit_blocks = 0
        self.used = 0  # number of the last insertion that went through it

    def num_common(self, hashes: list[bytes], depth: int) -> int:
        """How many of its blocks follow in a prompt after `depth` others. Where hashes agree, all before them do."""
        length = min(len(self.hashes), len(hashes) - depth)
        return bisect.bisect_left(range(length), True, key=lambda idx: self.hashes[idx] != hashes[depth + idx])


class PrefixTree:
    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.block_tokens = max(kv.block_sizes)
        self.group_idx = kv.block_sizes.index(self.block_tokens)
        self.root = Node(0, None, [])
        self.nodes: dict[int, Node] = {}
        self.num_inserted = 0
        self._encoded: msgspec.Raw | None = None
        self._age = 0

    def insert(self, hashes: list[bytes], num_blocks: int, num_hit: int) -> None:
        """The first `num_blocks` are a prompt's; the first `num_hit` of these were found in the cache."""
        hashes = hashes[: min(num_blocks, MAX_DEPTH)]
        self.num_inserted += 1
        node, depth = self.root, 0
        while depth < len(hashes):
            child = node.children.get(hashes[depth])
            if child is None:
                # What was found ends a node of its own: others may share it.
                end = num_hit if depth < num_hit < len(hashes) else len(hashes)
                child = self._add(node, hashes[depth:end])
            elif (num_common := child.num_common(hashes, depth)) < len(child.hashes):
                child = self._split(child, num_common)
            child.requests += 1
            child.used = self.num_inserted
            if num_hit > depth:
                child.hits += 1
                child.hit_blocks += min(num_hit - depth, len(child.hashes))
            depth += len(child.hashes)
            node = child
        if len(self.nodes) > MAX_NODES + SLACK_NODES:
            self._drop_oldest()

    def _add(self, parent: Node, hashes: list[bytes]) -> Node:
        number = secrets.randbelow(999) + 1
        while number in self.nodes:
            number = secrets.randbelow(999) + 1
        node = self.nodes[number] = parent.children[hashes[0]] = Node(number, parent, hashes)
        return node

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cuts a node after `num_blocks`; returns the upper part, which is new."""
        upper = self._add(node.parent, node.hashes[:num_blocks])
        upper.requests, upper.hits = node.requests, node.hits
        # How much of each part was hit is known where all hits took all of it; else it was mostly the beginning.
        upper.hit_blocks = min(node.hit_blocks, node.hits * num_blocks)
        node.hit_blocks -= upper.hit_blocks
        del node.hashes[:num_blocks]
        node.hits = min(node.hits, -(-node.hit_blocks // len(node.hashes)))
        node.parent = upper
        upper.children[node.hashes[0]] = node
        return upper

    def _drop_oldest(self) -> None:
        """Drops leaves that were not used for longest, until there are not too many nodes."""
        leaves = [(node.used, node.number) for node in self.nodes.values() if not node.children]
        heapq.heapify(leaves)
        while len(self.nodes) > MAX_NODES:
            node = self.nodes.pop(heapq.heappop(leaves)[1])
            parent = node.parent
            del parent.children[node.hashes[0]]
            if not parent.children and parent is not self.root:
                heapq.heappush(leaves, (parent.used, parent.number))

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
        if len(self.nodes) > MAX_NODES:
            self._drop_oldest()
        cached = self.kv.pool_of[self.group_idx].cached
        size, group_idx = self.block_tokens, self.group_idx
        rows: list[tuple[int, ...]] = []
        level = list(self.root.children.values())
        while level:
            for node in level:
                counts = len(node.hashes) * size, node.requests, node.hits, node.hit_blocks * size
                is_cached = (group_idx, node.hashes[-1]) in cached
                rows.append((node.number, node.parent.number, *counts, int(is_cached)))
            level = [child for node in level if node.children for child in node.children.values()]
        return rows
