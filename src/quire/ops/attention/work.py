"""The work list of paged attention: a step's rows, cut into units that take about equally long.

Planned on the host, once per step and group of layers; read by the kernels of `triton.py` and of `ops/mla/triton.py`.

A tile is some consecutive queries of one row, with all heads that share a key/value head. A tile with many keys is
split by keys; each such part, or a tile that is not split, is a unit of work: one entry of the list, one program per
key/value head.

Shape letters: K key/value heads, D head size, U units, M rows of a tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops.attention.reference import AttentionTables
from quire.ops.launch import num_multiprocessors

# Split boundaries are multiples of this many keys; below MIN_CHUNK keys a split costs more than it saves.
CHUNK_STEP = 64
MIN_CHUNK = 256
LEAST_REST = 4  # a rest of less than a chunk's fourth is not split off: that costs more than it saves

# The columns of a unit of work.
(
    ROW,  # of the block table
    FIRST_TOKEN,  # index in the step of the first query
    NUM_TOKENS,  # number of queries; 0: nothing to do
    POSITION,  # of the first query
    FIRST_KEY,
    END_KEY,
    NUM_SPLITS,  # units that the tile is split into
    FIRST_UNIT,  # index of the first of those
) = range(8)
UNIT_WORDS = 8


class Tile(NamedTuple):
    """How a program cuts up its work; `config` chooses."""

    tile_m: int  # query tokens times heads of a group: a power of two, at least 16 and G
    tile_n: int  # keys per turn of the loop
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int  # the planner splits long contexts until there are so many programs


class WorkShape(NamedTuple):
    """How the work of a kind of layer is cut up."""

    tile: Tile
    num_kv_heads: int
    group_size: int  # query heads of one key/value head
    size: int  # of a head's result


def max_units(
    num_tokens: int, num_rows: int, *, tile_m: int, group_size: int, num_kv_heads: int, num_programs: int
) -> int:
    """The most units that `plan_units` can give for so many query tokens in so many rows."""
    tokens_per_tile = tile_m // group_size
    num_rows = min(num_rows, num_tokens)
    num_tiles = (num_tokens + num_rows * (tokens_per_tile - 1)) // tokens_per_tile
    return num_tiles + max(1, num_programs // num_kv_heads) - 1


def max_split_units(num_units: int, *, num_kv_heads: int, num_programs: int) -> int:
    """The most units that can belong to split tiles. They are the first ones, and need room for partial results."""
    return min(num_units, 2 * max(1, num_programs // num_kv_heads) - 1)


def plan_units(
    starts: np.ndarray,
    num_queries: np.ndarray,
    context_lens: np.ndarray,
    rows: np.ndarray | None,
    *,
    tile_m: int,
    group_size: int,
    num_kv_heads: int,
    window: int,
    num_programs: int,
) -> np.ndarray:
    """The units of a step, int32 [U, 8]: longest tiles first, so that all programs end at about the same time.

    Each row has `num_queries` tokens of the step, from `starts` on, and `context_lens` tokens in all, these included.
    Tiles are split when they alone would give fewer programs than `num_programs`, or some would take far longer than
    others. A tile's splits follow each other, and split tiles come before the others, as they are longer.
    """
    units = np.ones((len(context_lens), UNIT_WORDS), np.int32)
    units[:, ROW] = np.arange(len(units)) if rows is None else rows
    units[:, FIRST_TOKEN] = starts
    units[:, NUM_TOKENS] = num_queries
    units[:, POSITION] = context_lens - num_queries
    tokens_per_tile = tile_m // group_size
    if np.minimum.reduce(num_queries) < 1 or np.maximum.reduce(num_queries) > tokens_per_tile:
        units = _tiles(units, tokens_per_tile)
    end = units[:, POSITION] + units[:, NUM_TOKENS]
    units[:, FIRST_KEY] = np.maximum(units[:, POSITION] - (window - 1), 0) if window else 0
    units[:, END_KEY] = end
    length = end - units[:, FIRST_KEY]
    if len(units) > 1:
        order = (-length).argsort(kind="stable")
        units, length = units[order], length[order]

    chunk = -(-int(np.add.reduce(length)) // max(1, num_programs // num_kv_heads))
    longest = int(length[0]) if len(length) else 0
    chunk = _round_up(max(MIN_CHUNK, chunk), CHUNK_STEP)
    units[:, FIRST_UNIT] = np.arange(len(units))
    return _splits(units, length, chunk) if longest >= chunk + chunk // LEAST_REST else units


def _tiles(rows: np.ndarray, tokens_per_tile: int) -> np.ndarray:
    """Rows cut into tiles: sets the columns that say which queries. Rows without queries disappear."""
    num_queries = rows[:, NUM_TOKENS]
    num_tiles = (num_queries + (tokens_per_tile - 1)) // tokens_per_tile
    tiles = rows.repeat(num_tiles, 0)
    first_tiles = num_tiles.cumsum() - num_tiles
    offset = (np.arange(len(tiles)) - first_tiles.repeat(num_tiles)) * tokens_per_tile
    tiles[:, FIRST_TOKEN] += offset
    tiles[:, NUM_TOKENS] = np.minimum(tiles[:, NUM_TOKENS] - offset, tokens_per_tile)
    tiles[:, POSITION] += offset
    return tiles


def _splits(tiles: np.ndarray, length: np.ndarray, chunk: int) -> np.ndarray:
    """Tiles cut into equal splits of about `chunk` keys: sets the columns that say which keys."""
    num_splits = np.maximum((length + (chunk - chunk // LEAST_REST)) // chunk, 1)
    keys = _round_up(-(-length // num_splits), CHUNK_STEP)  # of a split
    num_splits = np.maximum(-(-length // keys), 1)
    tiles[:, NUM_SPLITS] = num_splits
    tiles[:, FIRST_UNIT] = num_splits.cumsum() - num_splits
    units = tiles.repeat(num_splits, 0)
    keys = keys.repeat(num_splits)
    units[:, FIRST_KEY] += (np.arange(len(units)) - units[:, FIRST_UNIT]) * keys
    np.minimum(units[:, FIRST_KEY] + keys, units[:, END_KEY], out=units[:, END_KEY])
    return units


def _round_up(n: int | np.ndarray, step: int) -> Any:
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """A step's units on the device, and memory to merge split tiles in, which successive launches may share.

    `units` may be longer than the plan: entries of zeros have no queries. `counters` are zero between launches.
    """

    units: Tensor  # int32 [U, 8]
    tile: Tile
    partials: Tensor  # float32 [split units, K, M, D]: unnormalized results
    stats: Tensor  # float32 [split units, K, 2, M]: running maximum (of scores times log2 e) and sum
    counters: Tensor  # int32 [split units, K]: at a tile's first unit, how many of its splits are done

    @staticmethod
    def of(units: Tensor, tile: Tile, num_split_units: int, num_kv_heads: int, head_size: int) -> "AttentionWork":
        shape = (max(1, num_split_units), num_kv_heads)
        return AttentionWork(
            units,
            tile,
            torch.empty((*shape, tile.tile_m, head_size), dtype=torch.float32, device=units.device),
            torch.empty((*shape, 2, tile.tile_m), dtype=torch.float32, device=units.device),
            torch.zeros(shape, dtype=torch.int32, device=units.device),
        )


def plan(query: Tensor, tables: AttentionTables, shape: WorkShape, window: int = 0) -> AttentionWork:
    """The work of a step, on `query`'s device. Copies the tables to the host first: for tests and simple callers."""
    tile, num_kv_heads, group_size, size = shape
    rows = None if tables.rows is None else tables.rows.cpu().numpy()
    num_programs = tile.programs_per_multiprocessor * num_multiprocessors(query)
    query_starts = tables.query_starts.cpu().numpy()
    units = plan_units(
        query_starts[:-1],
        np.diff(query_starts),
        tables.context_lens.cpu().numpy(),
        rows,
        tile_m=tile.tile_m,
        group_size=group_size,
        num_kv_heads=num_kv_heads,
        window=window,
        num_programs=num_programs,
    )
    num_split_units = int(np.count_nonzero(units[:, NUM_SPLITS] > 1))
    return AttentionWork.of(torch.from_numpy(units).to(query.device), tile, num_split_units, num_kv_heads, size)
