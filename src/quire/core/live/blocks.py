"""The KV memory as a map for somebody who watches: cells of neighbouring blocks, how many are owned or cached, by whom.

Made by `view.py` with the first watcher. Looks at a bounded number of blocks per update, however many there are: of a
large pool a part at a time. Knows block ids and the numbers it is given for requests, nothing else of them.
"""

from itertools import compress
from typing import Any

from quire.kv.manager import KVManager, RequestBlocks
from quire.kv.pool import BlockPool

MAX_CELLS = 400  # of all pools together
SWEPT_BLOCKS = 6144  # per update
WALKED_BLOCKS = 4096  # new entries of block tables, per update
# Of a cell, looked at to find its owner, and to find how many are cached.
OWNER_BLOCKS = 16
CONTENT_BLOCKS = 48
NO_OWNER = 0
# What the map says in place of a request's row.
NOBODY, NOT_LISTED = -1, -2


class PoolMap:
    def __init__(self, pool: BlockPool, max_cells: int, block_tokens: list[int]) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.num_blocks = pool.num_blocks - 1  # the null block is not shown
        self.cell_blocks = max(1, -(-self.num_blocks // max_cells))
        self.num_cells = -(-self.num_blocks // self.cell_blocks)
        self.cells_per_sweep = min(self.num_cells, max(1, SWEPT_BLOCKS // self.cell_blocks))
        self.stride = max(1, self.cell_blocks // OWNER_BLOCKS)
        self.owned = [0] * self.num_cells
        self.cached = [0] * self.num_cells
        self.owner = [NO_OWNER] * self.num_cells
        self.owners = [NO_OWNER] * pool.num_blocks  # who was last seen to own a block
        self.next_cell = 0

    @property
    def num_sweeps(self) -> int:
        """Updates after which all of it was looked at."""
        return -(-self.num_cells // self.cells_per_sweep) if self.num_cells else 1

    def sweep(self) -> None:
        """Looks at the next cells."""
        for _ in range(self.cells_per_sweep):
            cell = self.next_cell
            self.next_cell = (cell + 1) % self.num_cells
            self._look_at(cell, 1 + cell * self.cell_blocks)

    def _look_at(self, cell: int, start: int) -> None:
        end = start + self.cell_blocks
        held = self.pool.ref_counts[start:end]
        num_unheld = held.count(0)
        self.owned[cell] = num_owned = len(held) - num_unheld
        self.cached[cell] = self._num_cached(start, held, num_unheld) if num_unheld else 0
        self.owner[cell] = self._main_owner(start, held) if num_owned else NO_OWNER

    def _num_cached(self, start: int, held: list[int], num_unheld: int) -> int:
        """Of the blocks that nobody holds, those with content; in a large cell estimated from a part of them."""
        stride = max(1, self.cell_blocks // CONTENT_BLOCKS)
        sampled = held[::stride]
        found = list(compress(sampled, self.pool.content[start : start + self.cell_blocks : stride])).count(0)
        if stride == 1:
            return found
        num_sampled = sampled.count(0)
        return round(num_unheld * found / num_sampled) if num_sampled else 0

    def _main_owner(self, start: int, held: list[int]) -> int:
        sampled = self.owners[start : start + self.cell_blocks : self.stride]
        found = list(compress(sampled, held[:: self.stride]))
        if not found:  # few are owned, and none of them was sampled
            return self.owners[start + next(idx for idx, count in enumerate(held) if count)]
        first = found[0]
        return first if found.count(first) == len(found) else max(set(found), key=found.count)

    def shown(self, row_of: dict[int, int], interval_s: float) -> dict[str, Any]:
        """`row_of`: the row of each request that is listed, by its number."""
        num_free = self.pool.num_free
        cached = min(sum(self.cached), num_free)
        listed = {NO_OWNER: NOT_LISTED, **row_of}
        owners = [listed.get(owner, NOT_LISTED) if owned else NOBODY for owner, owned in zip(self.owner, self.owned)]
        return {
            "blocks": self.num_blocks,
            "free": num_free - cached,
            "cached": cached,
            "owned": self.num_blocks - num_free,  # those in limbo, too
            "block_tokens": self.block_tokens,
            "cell_blocks": self.cell_blocks,
            "refresh_s": self.num_sweeps * interval_s,
            "cells": {"owned": self.owned, "cached": self.cached, "owner": owners},
        }


class BlockMap:
    """The maps of all pools."""

    def __init__(self, kv: KVManager) -> None:
        sizes: dict[int, list[int]] = {}
        for group in kv.groups:
            sizes.setdefault(group.pool_idx, []).append(group.block_size)
        max_cells = max(1, MAX_CELLS // len(kv.pools))
        self.pools = [PoolMap(pool, max_cells, sizes.get(idx, [])) for idx, pool in enumerate(kv.pools)]
        self.pool_of = [self.pools[group.pool_idx] for group in kv.groups]
        self.has_holes = [group.spec.is_state for group in kv.groups]
        self.num_groups = len(kv.groups)
        self.left = WALKED_BLOCKS  # entries of block tables that may be looked at in this update

    def sweep(self) -> None:
        """Called once per update, after the requests were walked."""
        self.left = WALKED_BLOCKS
        for pool in self.pools:
            pool.sweep()

    def walk(self, number: int, blocks: RequestBlocks, seen: list[int]) -> int:
        """Notes which blocks a request owns; returns how many. `seen`: entries of each table known already."""
        count = 0
        for group_idx, table in enumerate(blocks.tables):
            length = len(table)
            count += length - (table.count(0) if self.has_holes[group_idx] else blocks.num_dropped[group_idx])
            known = seen[group_idx]
            if length > known and self.left > 0:
                new = table[known : known + self.left]
                owners = self.pool_of[group_idx].owners
                for block in new:
                    owners[block] = number
                seen[group_idx] = known + len(new)
                self.left -= len(new)
        return count

    def shown(self, row_of: dict[int, int], interval_s: float) -> dict[str, Any]:
        return {"pools": [pool.shown(row_of, interval_s) for pool in self.pools]}
