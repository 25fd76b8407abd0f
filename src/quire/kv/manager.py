"""The paged cache's bookkeeping: blocks of each request, prefix hits, forks, freeing behind a window, moves to a tier.

Called by `core/scheduler.py`. Knows tokens and block ids, not the states of requests and not tensors. Everything that
differs between groups is asked of their specs, so models with several kinds of caches are no special case.
"""

import math
from collections.abc import Sequence

from quire.errors import EngineError
from quire.kv.news import PrefixNews
from quire.kv.pool import NULL_BLOCK, BlockPool
from quire.kv.prefix import HashChain, root_hash
from quire.kv.specs import KVLayout
from quire.kv.tier import NoTier
from quire.step import Move


class RequestBlocks:
    """One request's block tables (one per group), and how many blocks of each have been published and dropped."""

    __slots__ = ("tokens", "tables", "num_published", "num_dropped", "chains", "capacity", "next_advance", "pinned")

    def __init__(self, tokens: list[int], salt: str, block_sizes: Sequence[int]) -> None:
        self.tokens = tokens  # the request's own list: it grows as tokens are generated
        root = root_hash(salt)
        self.chains = {size: HashChain(root, size) for size in set(block_sizes)}
        self.pinned: int | None = None  # tokens after which a fork may still start: blocks that it needs are kept
        self.reset(len(block_sizes))

    def reset(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_published = [0] * num_groups  # leading blocks offered to the prefix cache
        self.num_dropped = [0] * num_groups  # leading blocks that were freed because no query needs them any more
        self.capacity = 0  # tokens that fit into the blocks held: up to here grow() has nothing to do
        self.next_advance = 0  # below this many computed tokens advance() has nothing to do


class KVManager:
    def __init__(
        self,
        layout: KVLayout,
        enable_prefix_caching: bool = True,
        tier: NoTier = NoTier(),
        news: PrefixNews | None = None,
    ) -> None:
        """`news`: is told which blocks can be found, where somebody wants to know."""
        self.groups = layout.groups
        self.block_sizes = [group.block_size for group in layout.groups]
        self.pool_layouts = layout.pools
        self.pools = [BlockPool(pool.num_blocks, self._before_forgetting) for pool in layout.pools]
        self.pool_of = [self.pools[group.pool_idx] for group in layout.groups]
        self.prefix_caching = enable_prefix_caching
        self.tier = tier
        self.moves: list[Move] = []  # of the step that is being planned
        self.moved_bytes = 0  # by `moves`
        self.loaded_places: set[tuple[int, int]] = set()  # (pool, place) that `moves` load from
        self._no_blocks: list[list[int]] = [[] for _ in layout.groups]
        self.live: dict[int, RequestBlocks] = {}  # by id(): all that hold blocks
        self.can_rewind = not any(group.spec.is_state for group in layout.groups)  # a state cannot be undone
        self.hit_unit = math.lcm(*self.block_sizes)  # tokens: a hit ends where a block of every group ends
        self.news = news
        # Whose blocks are told: those of a group that needs all of them, if there is one, since they make the hit.
        whole = [idx for idx, group in enumerate(layout.groups) if not group.spec.window and not group.spec.is_state]
        self.told_group = whole[0] if whole else 0

    # -- entering ------------------------------------------------------------------------------------------------

    def open(self, tokens: list[int], salt: str) -> RequestBlocks:
        return RequestBlocks(tokens, salt, self.block_sizes)

    def find_prefix(self, blocks: RequestBlocks) -> int:
        """Tokens of the longest cached prefix after which every group can continue; never includes the last token."""
        if not self.prefix_caching:
            return 0
        length = (len(blocks.tokens) - 1) // self.hit_unit * self.hit_unit
        while length > 0:
            supported = length
            for group_idx in range(len(self.groups)):
                supported = self._supported(group_idx, blocks, supported)
            if supported == length:
                supported -= self._too_much_to_load(blocks, length)
            if supported == length:
                return length
            length = supported
        return 0

    def can_admit(self, blocks: RequestBlocks, num_cached: int, chunk_tokens: int) -> bool:
        """Whether the request's present tokens would fit into the free blocks. (They are taken later, by chunks.)"""
        needed = [0] * len(self.pools)
        for group_idx, group in enumerate(self.groups):
            count = group.spec.most_blocks(len(blocks.tokens), chunk_tokens, group.block_size)
            for block in self._found_blocks(group_idx, blocks, num_cached):
                if block is not None and self.pool_of[group_idx].ref_counts[block] > 0:
                    count -= 1  # shared with a running request: needs no free block
            needed[group.pool_idx] += count
        return all(count <= pool.num_free for count, pool in zip(needed, self.pools))

    def enter(self, blocks: RequestBlocks, num_cached: int) -> None:
        """The request starts to hold blocks: those of its prefix hit, or none. Blocks in the tier are loaded."""
        tables = [self._found_blocks(group_idx, blocks, num_cached) for group_idx in range(len(self.groups))]
        loads = self._plan_loads(blocks, tables)
        # Found blocks are shared first, because taking a block may evict one that nobody holds.
        for group_idx, table in enumerate(tables):
            found = [NULL_BLOCK if block is None else block for block in table]
            self.pool_of[group_idx].share(found)
            self._adopt(blocks, group_idx, found, num_cached)
        for group_idx, idx, place in loads:
            (block,) = self.pool_of[group_idx].take_blocks(1)
            blocks.tables[group_idx][idx] = block
            # This block and those after it are published when the step that loads it is applied.
            blocks.num_published[group_idx] = min(blocks.num_published[group_idx], idx)
            self.moves.append(Move(self.groups[group_idx].pool_idx, block, place, is_load=True))
        self.live[id(blocks)] = blocks

    def fork(self, parent: RequestBlocks, child: RequestBlocks, max_tokens: int) -> int:
        """The child starts by sharing the parent's computed full blocks, up to `max_tokens`; returns how many tokens.

        Nothing is copied: the child computes the rest of its tokens itself. For a model with one kind of cache that is
        at most one block.
        """
        length = max_tokens // self.hit_unit * self.hit_unit
        while length > 0 and not all(self._holds(group_idx, parent, length) for group_idx in range(len(self.groups))):
            length -= self.hit_unit
        for group_idx, size in enumerate(self.block_sizes):
            needed = self._needed(group_idx, length)
            shared = parent.tables[group_idx][: length // size]
            table = [block if idx in needed else NULL_BLOCK for idx, block in enumerate(shared)]
            self.pool_of[group_idx].share(table)
            self._adopt(child, group_idx, table, length)
        self.live[id(child)] = child
        return length

    def pin(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Keeps, as windows move on, the blocks that a fork after the first `num_tokens` needs."""
        blocks.pinned = num_tokens // self.hit_unit * self.hit_unit

    # -- growing -------------------------------------------------------------------------------------------------

    def grow(self, blocks: RequestBlocks, num_tokens: int) -> list[list[int]] | None:
        """Room for `num_tokens` tokens in all: the blocks added to each group's table, or None if too few are free."""
        if num_tokens <= blocks.capacity:
            return self._no_blocks
        written = []  # per group: the length of its table afterwards, and which of the added entries get a block
        needed = [0] * len(self.pools)
        for group, table in zip(self.groups, blocks.tables):
            num_after = max(len(table), -(-num_tokens // group.block_size))
            new = group.spec.written_blocks(len(table), num_after, self.hit_unit // group.block_size)
            written.append((num_after, new))
            needed[group.pool_idx] += len(new)
        if any(count > pool.num_free for count, pool in zip(needed, self.pools)):
            return None
        gained = []
        for pool, table, (num_after, new) in zip(self.pool_of, blocks.tables, written):
            added = [NULL_BLOCK] * (num_after - len(table))
            for idx, block in zip(new, pool.take_blocks(len(new))):
                added[idx - len(table)] = block
            table.extend(added)
            gained.append(added)
        blocks.capacity = min(len(table) * size for size, table in zip(self.block_sizes, blocks.tables))
        return gained

    def advance(self, blocks: RequestBlocks, num_computed: int, step_in_flight: int | None) -> None:
        """`num_computed` tokens are in the cache: publishes full blocks, frees those that no query needs any more."""
        if num_computed < blocks.next_advance:
            return
        if num_computed > len(blocks.tokens):
            raise EngineError("tokens were computed that the request does not have: their blocks cannot be named")
        for group_idx, size in enumerate(self.block_sizes):
            table = blocks.tables[group_idx]
            pool = self.pool_of[group_idx]
            num_full = num_computed // size
            if self.prefix_caching and num_full > blocks.num_published[group_idx]:
                hashes = blocks.chains[size].upto(blocks.tokens, num_full)
                news = self.news if group_idx == self.told_group else None
                for idx in range(blocks.num_published[group_idx], num_full):
                    if table[idx] != NULL_BLOCK and pool.publish(table[idx], group_idx, hashes[idx]):
                        if news is not None:
                            news.came(hashes[idx])
                blocks.num_published[group_idx] = num_full
            needed_at = num_computed if blocks.pinned is None else min(num_computed, blocks.pinned)
            num_dropped = blocks.num_dropped[group_idx]
            first_needed = self._needed(group_idx, needed_at).start
            if first_needed > num_dropped:
                pool.let_go(table[num_dropped:first_needed], step_in_flight)
                table[num_dropped:first_needed] = [NULL_BLOCK] * (first_needed - num_dropped)
                blocks.num_dropped[group_idx] = first_needed
        # Blocks are published or dropped only where the sequence, or the window behind it, reaches the end of a block.
        blocks.next_advance = min(self._next_event(group_idx, num_computed) for group_idx in range(len(self.groups)))

    # -- moves between the pools and the tier --------------------------------------------------------------------

    def take_moves(self) -> list[Move]:
        """The copies that the step just planned does before it computes."""
        moves, self.moves = self.moves, []
        self.moved_bytes = 0
        self.loaded_places.clear()
        return moves

    def _before_forgetting(self, block: int, group_idx: int, content_hash: bytes) -> None:
        """Plans a copy of the block to the tier, if it has room and the step may copy more."""
        if self.news is not None and group_idx == self.told_group:
            self.news.went(content_hash)
        pool_idx = self.groups[group_idx].pool_idx
        block_bytes = self.pool_layouts[pool_idx].block_bytes
        if self.moved_bytes + block_bytes <= self.tier.max_step_bytes:
            place = self.tier.keep(pool_idx, group_idx, content_hash, self.loaded_places)
            if place is not None:
                self.moves.append(Move(pool_idx, block, place, is_load=False))
                self.moved_bytes += block_bytes

    def _plan_loads(self, blocks: RequestBlocks, tables: list[list[int | None]]) -> list[tuple[int, int, int]]:
        """(group, index in its table, place) of all entries of `tables` that are None.

        Their bytes are counted, and their places marked as used, before a block is taken for any of them: taking a
        block may copy its old content to the tier.
        """
        loads = []
        for group_idx, table in enumerate(tables):
            pool_idx = self.groups[group_idx].pool_idx
            hashes = blocks.chains[self.block_sizes[group_idx]].hashes
            for idx, block in enumerate(table):
                if block is not None:
                    continue
                place = self.tier.find(pool_idx, group_idx, hashes[idx])
                if place is None:
                    raise EngineError("a block of a prefix hit is neither in its pool nor in the tier")
                loads.append((group_idx, idx, place))
                self.loaded_places.add((pool_idx, place))
                self.moved_bytes += self.pool_layouts[pool_idx].block_bytes
        return loads

    def _too_much_to_load(self, blocks: RequestBlocks, length: int) -> int:
        """By how many tokens, at least, a hit must be shortened so that one step can load it."""
        if not self.tier.num_places:
            return 0
        load_bytes = unit_bytes = 0
        for group_idx, group in enumerate(self.groups):
            block_bytes = self.pool_layouts[group.pool_idx].block_bytes
            load_bytes += block_bytes * self._found_blocks(group_idx, blocks, length).count(None)
            unit_bytes += block_bytes * self.hit_unit // group.block_size
        excess = load_bytes - (self.tier.max_step_bytes - self.moved_bytes)
        return max(1, excess // unit_bytes) * self.hit_unit if excess > 0 else 0

    # -- leaving -------------------------------------------------------------------------------------------------

    def release(self, blocks: RequestBlocks, step_in_flight: int | None) -> None:
        """Frees the request's blocks. The last ones are evicted first, so that beginnings stay cached longest."""
        if self.live.pop(id(blocks), None) is None:
            return
        for pool, table in zip(self.pool_of, blocks.tables):
            pool.let_go(table[::-1], step_in_flight)
        blocks.reset(len(self.groups))

    def forget_prefixes(self) -> None:
        """No cached block can be found any more; requests keep those that they hold."""
        for pool in self.pools:
            pool.forget_contents()
        self.tier.forget_all()
        if self.news is not None:
            self.news.reset()

    def step_applied(self, step_id: int) -> None:
        for pool in self.pools:
            pool.step_applied(step_id)

    @property
    def usage(self) -> float:
        """Share of blocks in use, of the pool that is fullest."""
        return max(1 - pool.num_free / (pool.num_blocks - 1) if pool.num_blocks > 1 else 0.0 for pool in self.pools)

    @property
    def num_limbo(self) -> int:
        return sum(pool.num_limbo for pool in self.pools)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the shared pool if no block is ever dropped behind a window."""
        shared = [size for size, pool in zip(self.block_sizes, self.pool_of) if pool is self.pools[0]]
        return (self.pools[0].num_blocks - 1) // len(shared) * min(shared)

    def _next_event(self, group_idx: int, num_computed: int) -> int:
        """The number of computed tokens at which the group next fills a block, or drops one behind its window."""
        size = self.block_sizes[group_idx]
        # Once the window is full, its beginning moves by one token with each computed token.
        first_needed = self.groups[group_idx].spec.first_needed(num_computed)
        return num_computed + size - max(num_computed % size, first_needed % size)

    # -- what a group needs --------------------------------------------------------------------------------------

    def _needed(self, group_idx: int, num_tokens: int) -> range:
        """The blocks that a request needs to continue after `num_tokens` tokens."""
        return self.groups[group_idx].spec.needed_blocks(num_tokens, self.block_sizes[group_idx])

    def _supported(self, group_idx: int, blocks: RequestBlocks, length: int) -> int:
        """The longest hit of at most `length` tokens for which this group has every needed block, in hit units."""
        size = self.block_sizes[group_idx]
        hashes = blocks.chains[size].upto(blocks.tokens, length // size)
        pool = self.pool_of[group_idx]
        pool_idx = self.groups[group_idx].pool_idx
        known: dict[int, bool] = {}  # index of a block -> whether it is cached

        def is_cached(idx: int) -> bool:
            if idx not in known:
                in_pool = pool.find(group_idx, hashes[idx]) is not None
                known[idx] = in_pool or self.tier.find(pool_idx, group_idx, hashes[idx]) is not None
            return known[idx]

        if self._needed(group_idx, length).start == 0:  # every block is needed: count up to the first miss
            idx = 0
            while idx < length // size and is_cached(idx):
                idx += 1
            return idx * size // self.hit_unit * self.hit_unit
        while length > 0:
            # A hit that does not need the missing block must end before it.
            missing = next((idx for idx in reversed(self._needed(group_idx, length)) if not is_cached(idx)), None)
            if missing is None:
                return length
            length = missing * size // self.hit_unit * self.hit_unit
        return 0

    def _found_blocks(self, group_idx: int, blocks: RequestBlocks, length: int) -> list[int | None]:
        """The block table of a hit of `length` tokens; None where the block is in the tier."""
        size = self.block_sizes[group_idx]
        needed = self._needed(group_idx, length)
        hashes = blocks.chains[size].hashes
        pool = self.pool_of[group_idx]
        return [pool.find(group_idx, hashes[idx]) if idx in needed else NULL_BLOCK for idx in range(length // size)]

    def _adopt(self, blocks: RequestBlocks, group_idx: int, table: list[int], length: int) -> None:
        """`table`, whose blocks have the content of `length` tokens, becomes the request's."""
        blocks.tables[group_idx] = table
        blocks.num_published[group_idx] = len(table)
        blocks.num_dropped[group_idx] = self._needed(group_idx, length).start

    def _holds(self, group_idx: int, blocks: RequestBlocks, length: int) -> bool:
        """Whether the request has all blocks of the group that are needed after `length` tokens."""
        table = blocks.tables[group_idx]
        needed = self._needed(group_idx, length)
        return needed.stop <= len(table) and all(table[idx] != NULL_BLOCK for idx in needed)

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises EngineError unless every block is free, held or in limbo, and counts, tables and hashes agree."""
        for blocks in self.live.values():
            self._check_tables(blocks)
        for pool in self.pools:
            self._check_pool(pool)

    def _check_pool(self, pool: BlockPool) -> None:
        counted = [0] * pool.num_blocks
        for blocks in self.live.values():
            for table, table_pool in zip(blocks.tables, self.pool_of):
                if table_pool is pool:
                    for block in table:
                        counted[block] += 1
        limbo = [block for _, waiting in pool.limbo for block in waiting]
        _require(len(limbo) == pool.num_limbo == len(set(limbo)), "limbo counts its blocks wrongly")
        _require(pool.ref_counts[NULL_BLOCK] == 0 and NULL_BLOCK not in pool.free, "block 0 belongs to somebody")
        for block in range(1, pool.num_blocks):
            _require(pool.ref_counts[block] == counted[block], f"block {block}: count and tables disagree")
            states = (block in pool.free) + (counted[block] > 0) + (block in limbo)
            _require(states == 1, f"block {block} is in {states} states at once")
        for key, block in pool.cached.items():
            _require(pool.content[block] == key, f"block {block}: content and index disagree")
        num_found = sum(content is not None for content in pool.content)
        _require(len(pool.cached) == num_found, "a block has content the index does not list")

    def _check_tables(self, blocks: RequestBlocks) -> None:
        for group_idx, (table, size) in enumerate(zip(blocks.tables, self.block_sizes)):
            held = [block for block in table if block != NULL_BLOCK]
            _require(len(held) == len(set(held)), "a table holds a block twice")
            num_dropped = blocks.num_dropped[group_idx]
            _require(not any(table[:num_dropped]), "a block was dropped and is held")
            may_be_empty = self.groups[group_idx].spec.is_state
            _require(may_be_empty or all(table[num_dropped:]), "a needed block was dropped")
            hashes = blocks.chains[size].hashes
            for idx in range(min(blocks.num_published[group_idx], len(hashes))):
                content = self.pool_of[group_idx].content[table[idx]] if table[idx] != NULL_BLOCK else None
                _require(content is None or content == (group_idx, hashes[idx]), "a block's content is not its tokens'")


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise EngineError(f"KV bookkeeping is inconsistent: {broken}")
