"""The KV memory as a map for somebody who watches: cells of neighbouring blocks, how many are owned or cached, by whom.

Made by `view.py` with the first watcher. Looks at a bounded number of blocks per update, however many there are: of a
large pool a part at a time. Knows block ids and the numbers it is given for requests, nothing else of them.
"""

from collections.abc import Iterable
from itertools import compress
from typing import Any

from quire.kv.manager import KVManager, RequestBlocks
from quire.kv.pool import BlockPool

MAX_CELLS = 400  # of all pools together
# How many cells are looked at in an update: of SWEPT_BLOCKS blocks, where a cell counts as CELL_COST more than it has.
SWEPT_BLOCKS = 8192
CELL_COST = 128
WALKED_BLOCKS = 4096  # new entries of block tables, per update
# Of a cell, looked at to find its owner, and to find how many are cached.
OWNER_BLOCKS = 16
CONTENT_BLOCKS = 24
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
        self.cells_per_sweep = min(self.num_cells, max(1, SWEPT_BLOCKS // (CELL_COST + self.cell_blocks)))
        self.owner_stride = max(1, self.cell_blocks // OWNER_BLOCKS)
        self.content_stride = max(1, self.cell_blocks // CONTENT_BLOCKS)
        self.owned = [0] * self.num_cells
        self.cached = [0] * self.num_cells
        self.owner = [NO_OWNER] * self.num_cells
        self.owner_rows = [NOBODY] * self.num_cells
        self.owners = [NO_OWNER] * pool.num_blocks  # who was last seen to own a block
        self.row_of: dict[int, int] = {}  # when `owner_rows` was made
        self.next_cell = 0
        self.is_new = True

    @property
    def num_sweeps(self) -> int:
        """Updates after which all of it was looked at."""
        return -(-self.num_cells // self.cells_per_sweep) if self.num_cells else 1

    def sweep(self, row_of: dict[int, int]) -> None:
        """Looks at the next cells, the first time at all. `row_of`: rows of the requests listed, by their numbers."""
        num_cells = self.num_cells if self.is_new else self.cells_per_sweep
        self.is_new = False
        cells = [(self.next_cell + idx) % self.num_cells for idx in range(num_cells)]
        self.next_cell = (self.next_cell + num_cells) % max(1, self.num_cells)
        for cell in cells:
            self._look_at(cell, 1 + cell * self.cell_blocks)
        self._find_rows(cells if row_of == self.row_of else range(self.num_cells), row_of)

    def _look_at(self, cell: int, start: int) -> None:
        held = self.pool.ref_counts[start : start + self.cell_blocks]
        num_unheld = 0 if all(held) else held.count(0)
        self.owned[cell] = num_owned = len(held) - num_unheld
        self.cached[cell] = self._num_cached(start, held, num_unheld) if num_unheld else 0
        self.owner[cell] = self._main_owner(start, held) if num_owned else NO_OWNER

    def _num_cached(self, start: int, held: list[int], num_unheld: int) -> int:
        """Of the blocks that nobody holds, those with content; in a large cell estimated from a part of them."""
        stride = self.content_stride
        sampled = held[::stride]
        found = list(compress(sampled, self.pool.content[start : start + self.cell_blocks : stride])).count(0)
        if stride == 1:
            return found
        num_sampled = sampled.count(0)
        return round(num_unheld * found / num_sampled) if num_sampled else 0

    def _main_owner(self, start: int, held: list[int]) -> int:
        stride = self.owner_stride
        found = list(compress(self.owners[start : start + self.cell_blocks : stride], held[::stride]))
        if not found:  # few are owned, and none of them was sampled
            return self.owners[start + next(idx for idx, count in enumerate(held) if count)]
        first = found[0]
        return first if found.count(first) == len(found) else max(set(found), key=found.count)

    def _find_rows(self, cells: Iterable[int], row_of: dict[int, int]) -> None:
        self.row_of = row_of
        for cell in cells:
            self.owner_rows[cell] = row_of.get(self.owner[cell], NOT_LISTED) if self.owned[cell] else NOBODY

    def shown(self, interval_s: float) -> dict[str, Any]:
        num_free = self.pool.num_free
        cached = min(sum(self.cached), num_free)
        return {
            "blocks": self.num_blocks,
            "free": num_free - cached,
            "cached": cached,
            "owned": self.num_blocks - num_free,  # those in limbo, too
            "block_tokens": self.block_tokens,
            "cell_blocks": self.cell_blocks,
            "refresh_s": self.num_sweeps * interval_s,
            "cells": {"owned": self.owned, "cached": self.cached, "owner": self.owner_rows},
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

    def sweep(self, row_of: dict[int, int]) -> None:
        """Called once per update, after the requests were walked."""
        self.left = WALKED_BLOCKS
        for pool in self.pools:
            pool.sweep(row_of)

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

    def shown(self, interval_s: float) -> dict[str, Any]:
        return {"pools": [pool.shown(interval_s) for pool in self.pools]}
