"""How products of packed weights are cut into tiles, and by which kernel; chosen by measurement on Hopper.

Used by `tiles.py`, `tiles_hopper.py`, `ops/moe/triton.py` and `quant/kept/triton.py`. Looks at shapes and kinds only.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.launch import INTERPRETED, capability, has_little_shared_memory, num_multiprocessors
from quire.ops.packed_linear.words import WordWeight

MAX_SPLITS = 8
MAX_ROWS, MAX_TWO_LEVEL_ROWS, MAX_OVERLAPPED_ROWS = 256, 32, 1024  # more are unpacked
# The library's products of bytes want outputs by so many, and blocks of inputs by so many: of others it takes wrong
# scales, and says nothing.
LIBRARY_OUTPUTS, LIBRARY_BLOCKS = 16, 4
WIDE_ROWS = 512  # from here on tiles are wide, if there are enough of them


class Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    runs: int = 1  # of inputs, that a step of the loop multiplies


class Rows(NamedTuple):
    """Which rows of x an expert multiplies: tiles of rows sorted by expert (`Plan` of `ops/moe/triton.py`)."""

    order: Tensor
    tiles: Tensor
    max_tiles: int
    top_k: int
    reads_tokens: bool  # rows of x are tokens, those of y sorted; otherwise the reverse


def fits(x_MK: Tensor, w: WordWeight) -> bool:
    """Whether tiles are faster than unpacking the weight, or the library cannot multiply its bytes."""
    if w.planes == 1:
        has_odd_blocks = w.scales_NG is not None and w.scales_NG.shape[1] % LIBRARY_BLOCKS != 0
        return w.n % LIBRARY_OUTPUTS != 0 or has_odd_blocks
    if overlaps(x_MK, w):
        return len(x_MK) <= MAX_OVERLAPPED_ROWS
    most = MAX_ROWS if w.scales_NS is None else MAX_TWO_LEVEL_ROWS
    return len(x_MK) <= most and x_MK.dtype == torch.bfloat16 and x_MK.is_contiguous()


def overlaps(x: Tensor, w: WordWeight) -> bool:
    """Whether `tiles_hopper.py` multiplies: on such a card, weights that are scaled as they are decoded."""
    is_hopper = x.is_cuda and not INTERPRETED and capability()[0] == 9
    is_scaled = w.planes > 1 and (w.folds_scales or w.pair is not None)
    return is_hopper and is_scaled and w.k % 8 == 0 and x.dtype == torch.bfloat16 and x.is_contiguous()


def _overlapped_cut(num_rows: int, n: int, k: int, multiprocessors: int) -> tuple[Tile, int]:
    """Three programs fill a multiprocessor; inputs are divided until there are so many.

    Rows that a tile lacks are slow, because their loads all wait for one line: rather two smaller tiles.
    """
    if num_rows >= WIDE_ROWS and triton.cdiv(num_rows, 128) * triton.cdiv(n, 128) >= 2 * multiprocessors:
        return Tile(128, 128, 8, 2), 1
    block_m = 64 if 64 < num_rows < 112 else min(max(16, triton.next_power_of_2(num_rows)), 128)
    num_tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(n, 64)
    num_stages = {16: 8, 32: 6, 64: 3, 128: 2}[block_m]
    splits = max(1, min(MAX_SPLITS, 3 * multiprocessors // num_tiles, k // 512))
    return Tile(block_m, 64, 4, num_stages), splits


def cut(x: Tensor, w: WordWeight, dtype: torch.dtype) -> tuple[Tile, int]:
    """How a product is cut up, and into how many parts of the inputs."""
    if overlaps(x, w):
        return _overlapped_cut(len(x), w.n, w.k, num_multiprocessors(x))
    tile = _tile(len(x), w, dtype)
    return tile, _num_splits(x, w, tile)


def expert_rows(mean: float, x: Tensor, w: WordWeight) -> int:
    """Rows of a tile, of experts with so many on average."""
    if overlaps(x, w):
        return min(max(16, triton.next_power_of_2(int(1.5 * mean))), 128)  # most experts have one tile
    largest = 128 if w.planes > 1 and not has_little_shared_memory() else 64
    return min(max(16, triton.next_power_of_2(int(mean))), largest)


def expert_cut(block_m: int, mean: float, x: Tensor, w: WordWeight, dtype: torch.dtype, is_gated: bool) -> Tile:
    """Of experts with so many rows on average, `block_m` of them in a tile."""
    if overlaps(x, w):
        is_wide = mean >= WIDE_ROWS and not is_gated
        return Tile(block_m, 128 if is_wide else 64, 4, 2)
    return _tile(block_m, w, dtype, is_gated)._replace(block_m=block_m)


def _tile(num_rows: int, w: WordWeight, dtype: torch.dtype, is_gated: bool = False) -> Tile:
    if dtype == torch.float32:  # for exactness: no tensor cores, speed does not matter
        return Tile(16, 32, 4, 2)
    largest = 64 if has_little_shared_memory() else 128
    block_m = min(max(16, triton.next_power_of_2(num_rows)), largest)
    if block_m == 128:
        return Tile(128, 64, 8 if is_gated else 4, 3)
    if block_m == 16 and (w.folds_scales or w.pair is not None):
        return Tile(16, 64, 4, 4 if w.folds_scales else 3, runs=2)
    return Tile(block_m, 64, 4, 3)


def _num_splits(x: Tensor, w: WordWeight, tile: Tile) -> int:
    """Enough for a few programs on each multiprocessor, each with hundreds of inputs."""
    num_tiles = triton.cdiv(len(x), tile.block_m) * triton.cdiv(w.n, tile.block_n)
    most = {16: 5 if w.folds_scales else 8, 32: 5, 64: 3}.get(tile.block_m, 2)  # programs of a multiprocessor
    wanted = most * num_multiprocessors(x) // num_tiles
    return max(1, min(MAX_SPLITS, wanted, w.k // 512))
