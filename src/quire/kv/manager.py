"""The paged cache's bookkeeping: which blocks each request holds, prefix hits, forks, freeing behind a sliding window.

Called by `core/scheduler.py`. Knows tokens and block ids, not requests' lives and not tensors. Everything a group wants
peculiar is asked of its spec: a hybrid model is no special case.
"""

import math
from collections.abc import Sequence

from quire.errors import EngineError
from quire.kv.groups import blocks_needed
from quire.kv.pool import NULL_BLOCK, BlockPool
from quire.kv.prefix import HashChain, root_hash
from quire.kv.specs import KVLayout


class RequestBlocks:
    """One request's block tables (one per group) and how far each has been published and dropped."""

    __slots__ = ("tokens", "tables", "num_published", "num_dropped", "chains", "capacity", "next_advance", "pinned")

    def __init__(self, tokens: list[int], salt: str, block_sizes: Sequence[int]) -> None:
        self.tokens = tokens  # the request's own list: it grows as tokens are generated
        root = root_hash(salt)
        self.chains = {size: HashChain(root, size) for size in set(block_sizes)}
        self.pinned: int | None = None  # a fork may still start here: keep what it would need
        self.reset(len(block_sizes))

    def reset(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_published = [0] * num_groups  # leading blocks offered to the prefix cache
        self.num_dropped = [0] * num_groups  # leading blocks passed by the window (sinks excepted)
        self.capacity = 0  # tokens that fit into the blocks held: grow() has nothing to do up to here
        self.next_advance = 0  # advance() has nothing to do below this many computed tokens


class KVManager:
    def __init__(self, layout: KVLayout, enable_prefix_caching: bool = True) -> None:
        self.groups = layout.groups
        self.block_sizes = [group.block_size for group in layout.groups]
        self.pool = BlockPool(layout.num_blocks, len(layout.groups))
        self.prefix_caching = enable_prefix_caching
        self._no_blocks: list[list[int]] = [[] for _ in layout.groups]
        self.live: dict[int, RequestBlocks] = {}  # by id(): the holders that check() counts
        self.hit_unit = math.lcm(*self.block_sizes)  # a hit ends where every group has a block border

    # -- entering ------------------------------------------------------------------------------------------------

    def open(self, tokens: list[int], salt: str) -> RequestBlocks:
        return RequestBlocks(tokens, salt, self.block_sizes)

    def find_prefix(self, blocks: RequestBlocks) -> int:
        """Tokens of the longest cached prefix that every group can continue from; never the last token."""
        if not self.prefix_caching:
            return 0
        length = (len(blocks.tokens) - 1) // self.hit_unit * self.hit_unit
        settled = False
        while not settled and length > 0:
            settled = True
            for group_idx in range(len(self.groups)):
                supported = self._supported(group_idx, blocks, length)
                if supported < length:
                    length, settled = supported, False
        return length

    def can_admit(self, blocks: RequestBlocks, num_cached: int, chunk_tokens: int) -> bool:
        """Would the request's present tokens fit into what is free? (They are taken chunk by chunk, later.)"""
        needed = 0
        for group_idx, group in enumerate(self.groups):
            needed += blocks_needed(group, len(blocks.tokens), chunk_tokens)
            for block in self._hit_blocks(group_idx, blocks, num_cached):
                if block != NULL_BLOCK and self.pool.ref_counts[block] > 0:
                    needed -= 1  # shared with somebody who runs: costs nothing
        return needed <= self.pool.num_free

    def enter(self, blocks: RequestBlocks, num_cached: int) -> None:
        """The request starts to hold blocks: those of its prefix hit, or none."""
        blocks.reset(len(self.groups))
        for group_idx in range(len(self.groups)):
            table = self._hit_blocks(group_idx, blocks, num_cached)
            self.pool.share(table)
            self._adopt(blocks, group_idx, table, num_cached)
        self.live[id(blocks)] = blocks

    def fork(self, parent: RequestBlocks, child: RequestBlocks, max_tokens: int) -> int:
        """The child enters sharing the parent's computed full blocks, up to `max_tokens`; returns how many tokens.

        The rest of its tokens it computes itself, at most a block's worth for a plain model: no copying.
        """
        length = max_tokens // self.hit_unit * self.hit_unit
        while length > 0 and not all(self._holds(g, parent, length) for g in range(len(self.groups))):
            length -= self.hit_unit
        child.reset(len(self.groups))
        for group_idx, size in enumerate(self.block_sizes):
            first, sinks = self._needed_range(group_idx, length)
            table = [
                block if idx < sinks or idx >= first else NULL_BLOCK
                for idx, block in enumerate(parent.tables[group_idx][: length // size])
            ]
            self.pool.share(table)
            self._adopt(child, group_idx, table, length)
        self.live[id(child)] = child
        return length

    def pin(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Windows that move on keep what a fork after the first `num_tokens` needs."""
        blocks.pinned = num_tokens // self.hit_unit * self.hit_unit

    # -- growing -------------------------------------------------------------------------------------------------

    def grow(self, blocks: RequestBlocks, num_tokens: int) -> list[list[int]] | None:
        """Room for `num_tokens` tokens in all: the new block ids per group, or None when they are not to be had."""
        if num_tokens <= blocks.capacity:
            return self._no_blocks
        wanted = [-(-num_tokens // size) - len(table) for size, table in zip(self.block_sizes, blocks.tables)]
        if sum(w for w in wanted if w > 0) > self.pool.num_free:
            return None
        new = []
        for table, count in zip(blocks.tables, wanted):
            fresh = self.pool.take(count) if count > 0 else []
            table.extend(fresh)
            new.append(fresh)
        blocks.capacity = min(len(table) * size for size, table in zip(self.block_sizes, blocks.tables))
        return new

    def advance(self, blocks: RequestBlocks, num_computed: int, step_in_flight: int | None) -> None:
        """`num_computed` tokens are in the cache for good: publish full blocks, drop what no query needs any more."""
        if num_computed < blocks.next_advance:
            return
        for group_idx, size in enumerate(self.block_sizes):
            table = blocks.tables[group_idx]
            full = num_computed // size
            if self.prefix_caching and full > blocks.num_published[group_idx]:
                hashes = blocks.chains[size].upto(blocks.tokens, full)
                for idx in range(blocks.num_published[group_idx], full):
                    if table[idx] != NULL_BLOCK:
                        self.pool.publish(table[idx], group_idx, hashes[idx])
                blocks.num_published[group_idx] = full
            needed_at = num_computed if blocks.pinned is None else min(num_computed, blocks.pinned)
            first, sinks = self._needed_range(group_idx, needed_at)
            start = max(blocks.num_dropped[group_idx], sinks)
            if first > start:
                self.pool.let_go(table[start:first], step_in_flight)
                table[start:first] = [NULL_BLOCK] * (first - start)
                blocks.num_dropped[group_idx] = first
        # Publishing and dropping both happen at block borders, of the sequence or of the window behind it.
        blocks.next_advance = min(self._next_event(g, num_computed) for g in range(len(self.groups)))

    # -- leaving -------------------------------------------------------------------------------------------------

    def release(self, blocks: RequestBlocks, step_in_flight: int | None) -> None:
        """The request holds nothing any more. Tails go first, so that beginnings stay findable longest."""
        if self.live.pop(id(blocks), None) is None:
            return
        for table in blocks.tables:
            self.pool.let_go(table[::-1], step_in_flight)
        blocks.reset(len(self.groups))

    def step_applied(self, step_id: int) -> None:
        self.pool.step_applied(step_id)

    @property
    def usage(self) -> float:
        usable = self.pool.num_blocks - 1
        return 1 - self.pool.num_free / usable if usable else 0.0

    def _next_event(self, group_idx: int, num_computed: int) -> int:
        size, spec = self.block_sizes[group_idx], self.groups[group_idx].spec
        border = (num_computed // size + 1) * size
        behind = spec.first_needed(num_computed + size)  # the window's start moves one token per token
        lag = num_computed + size - behind
        return min(border, num_computed + size - (num_computed - lag) % size) if behind > 0 else border

    # -- what a group needs --------------------------------------------------------------------------------------

    def _needed_range(self, group_idx: int, position: int) -> tuple[int, int]:
        """(first block a query at `position` needs, number of leading sink blocks it needs besides)."""
        spec, size = self.groups[group_idx].spec, self.block_sizes[group_idx]
        first = spec.first_needed(position) // size
        return first, min(first, -(-spec.num_sinks // size))

    def _supported(self, group_idx: int, blocks: RequestBlocks, length: int) -> int:
        """The longest hit of at most `length` tokens for which this group has every needed block, in hit units."""
        size = self.block_sizes[group_idx]
        hashes = blocks.chains[size].upto(blocks.tokens, length // size)
        found: dict[int, bool] = {}

        def has(idx: int) -> bool:
            if idx not in found:
                found[idx] = self.pool.find(group_idx, hashes[idx]) is not None
            return found[idx]

        if self._needed_range(group_idx, length)[0] == 0:  # needs everything: walk up to the first miss
            idx = 0
            while idx < length // size and has(idx):
                idx += 1
            return idx * size // self.hit_unit * self.hit_unit
        while length > 0:
            first, sinks = self._needed_range(group_idx, length)
            missing = next((i for i in range(length // size - 1, first - 1, -1) if not has(i)), None)
            if missing is None and all(has(i) for i in range(sinks)):
                return length
            # A block that is missing inside the window can only lie behind the end of a shorter hit.
            end = missing * size if missing is not None else length - self.hit_unit
            length = end // self.hit_unit * self.hit_unit
        return 0

    def _hit_blocks(self, group_idx: int, blocks: RequestBlocks, length: int) -> list[int]:
        size = self.block_sizes[group_idx]
        first, sinks = self._needed_range(group_idx, length)
        cached, hashes = self.pool.cached[group_idx], blocks.chains[size].hashes
        return [cached[hashes[i]] if i < sinks or i >= first else NULL_BLOCK for i in range(length // size)]

    def _adopt(self, blocks: RequestBlocks, group_idx: int, table: list[int], length: int) -> None:
        blocks.tables[group_idx] = table
        blocks.num_published[group_idx] = len(table)
        blocks.num_dropped[group_idx] = self._needed_range(group_idx, length)[0]

    def _holds(self, group_idx: int, blocks: RequestBlocks, length: int) -> bool:
        first, sinks = self._needed_range(group_idx, length)
        table, count = blocks.tables[group_idx], length // self.block_sizes[group_idx]
        needed = [*range(sinks), *range(first, count)]
        return count <= len(table) and all(table[i] != NULL_BLOCK for i in needed)

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises EngineError unless every block is free, held or in limbo, and counts, tables and hashes agree."""
        pool = self.pool
        counted = [0] * pool.num_blocks
        for blocks in self.live.values():
            self._check_tables(blocks)
            for table in blocks.tables:
                for block in table:
                    counted[block] += 1
        limbo = [block for _, waiting in pool.limbo for block in waiting]
        _require(len(limbo) == pool.num_limbo == len(set(limbo)), "limbo counts its blocks wrongly")
        _require(pool.ref_counts[NULL_BLOCK] == 0 and NULL_BLOCK not in pool.free, "block 0 belongs to somebody")
        for block in range(1, pool.num_blocks):
            _require(pool.ref_counts[block] == counted[block], f"block {block}: count and tables disagree")
            states = (block in pool.free) + (counted[block] > 0) + (block in limbo)
            _require(states == 1, f"block {block} is in {states} states at once")
        found = 0
        for group_idx, cached in enumerate(pool.cached):
            for content_hash, block in cached.items():
                _require(pool.content[block] == (group_idx, content_hash), f"block {block}: content and index disagree")
                found += 1
        _require(found == sum(c is not None for c in pool.content), "a block has content the index does not list")

    def _check_tables(self, blocks: RequestBlocks) -> None:
        for group_idx, (table, size) in enumerate(zip(blocks.tables, self.block_sizes)):
            held = [b for b in table if b != NULL_BLOCK]
            _require(len(held) == len(set(held)), "a table holds a block twice")
            sinks = -(-self.groups[group_idx].spec.num_sinks // size)
            dropped = range(min(sinks, blocks.num_dropped[group_idx]), blocks.num_dropped[group_idx])
            _require(
                all((table[i] == NULL_BLOCK) == (i in dropped) for i in range(len(table))), "a needed block was dropped, or the reverse"
            )
            hashes = blocks.chains[size].hashes
            for idx in range(min(blocks.num_published[group_idx], len(hashes))):
                content = self.pool.content[table[idx]] if table[idx] != NULL_BLOCK else None
                _require(content is None or content == (group_idx, hashes[idx]), "a block's content is not its tokens'")


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise EngineError(f"KV bookkeeping is inconsistent: {broken}")
