"""Paged attention in plain torch: the oracle for the fast kernels, and the path where no compiler or Triton is at hand.

Called by `layers/attention`. Knows tensors and block tables; nothing of requests, schedulers or models.

Shape letters: T query tokens of the step, R rows, H query heads, K key/value heads, G = H/K, D head size;
in a batch of tiles: B tiles, Q queries per tile, N keys per tile.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.rounding.reference import round_vectors

# A tile is at most this many consecutive queries of one row. It limits how many scores are computed in vain, for keys
# that come after the query.
MAX_TILE_QUERIES = 256
# Most score elements (tiles x heads x queries x keys) that one softmax may hold: 64 MiB in float32.
MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Where each row's queries and cached tokens are. The tensors lie on the device that computes."""

    query_starts: Tensor  # int32 [R + 1]: row r owns query tokens query_starts[r] .. query_starts[r + 1]
    context_lens: Tensor  # int32 [R]: cached tokens of the row, this step's own included
    block_table: Tensor  # int32 [R, max_blocks]: pool block of each logical block; anything where no query looks
    block_size: int  # tokens per block
    max_query_len: int  # over rows
    rows: Tensor | None = None  # int32 [R]: which row of `block_table` the r-th reads; None: the r-th
    work: tuple | None = None  # work lists on the device, for kernels that want them
    # int32 [rows of the batch]: how many tokens fewer a row has than its work was planned with
    shifts: Tensor | None = None
    # (first token, number of tokens) of each row that `work` leaves out: all its context is in this step
    uncached_prefills: tuple[tuple[int, int], ...] = ()


class _Tile(NamedTuple):
    row: int  # of the block table
    first_token: int  # index into q
    num_queries: int
    first_pos: int  # position of the first query
    first_key: int  # first position in the window of the first query

    @property
    def num_keys(self) -> int:
        return self.first_pos + self.num_queries - self.first_key


def write_kv(
    cache: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    slots_T: Tensor,
    scales: Tensor | None = None,
    fixed_scales: tuple[float, float] | None = None,
) -> None:
    """Store keys and values at `slots_T` (block id * block size + offset); a negative slot is padding.

    With `scales` [blocks, 2, block_size, K] the cache holds codes: k and v are rounded, here in place, too. Of
    `fixed_scales`, the first is for all keys and the second for all values.
    """
    keep = slots_T >= 0
    blocks, offsets = slots_T[keep] // cache.shape[2], slots_T[keep] % cache.shape[2]
    for half, x_TKD in enumerate((k_TKD, v_TKD)):
        codes = x_TKD
        if scales is not None:
            codes, scales_TK = round_vectors(x_TKD, cache.dtype, fixed_scales and fixed_scales[half])
            x_TKD.copy_(codes.float() * scales_TK[..., None])
            scales[blocks, half, offsets] = scales_TK[keep]
        cache[blocks, half, offsets] = codes[keep].to(cache.dtype)


def paged_attention(
    q_THD: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query over its row's cached tokens; `cache` is [blocks, 2, block_size, K, D].

    With `scales` [blocks, 2, block_size, K] it holds codes. `window` > 0 limits a query at position p to p-window+1 ..
    p. `sinks_H` is one learned logit per head that takes part in the softmax and has no value. Query tokens past
    `query_starts[R]` are padding: their output is not written.
    """

    def read(block_BN: Tensor, offset_BN: Tensor) -> Tensor:
        kv = cache[block_BN, :, offset_BN]
        return kv if scales is None else kv.float() * scales[block_BN, :, offset_BN].unsqueeze(-1)

    return attend_to(read, q_THD, tables, scale, window, sinks_H, softcap, out)


def attend_to(
    read: Callable[[Tensor, Tensor], Tensor],
    q_THD: Tensor,
    tables: AttentionTables,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_attention` to the keys and values that `read` gives, [B, N, 2, K, D], of blocks and offsets [B, N]."""
    out = torch.empty_like(q_THD) if out is None else out
    for batch, num_queries, num_keys in _batches(_tiles(tables, window), q_THD.shape[1]):
        fields = torch.tensor(batch, dtype=torch.int64, device=q_THD.device)
        row, token, count, pos, first_key = (column[:, None] for column in fields.unbind(1))
        # Padding repeats a tile's last query and last key, which exist; no unwritten slot is ever read.
        i_Q = torch.arange(num_queries, device=q_THD.device)[None]
        j_N = torch.arange(num_keys, device=q_THD.device)[None]
        real_BQ = i_Q < count
        token_BQ, query_pos_BQ = (start + torch.minimum(i_Q, count - 1) for start in (token, pos))
        key_pos_BN = first_key + j_N
        real_BN = key_pos_BN < pos + count
        key_pos_BN = torch.minimum(key_pos_BN, pos + count - 1)
        q_pos, k_pos = query_pos_BQ[:, :, None], key_pos_BN[:, None, :]
        visible_BQN = (k_pos <= q_pos) & real_BN[:, None]
        if window:
            visible_BQN &= k_pos > q_pos - window
        block_BN = tables.block_table[row, key_pos_BN // tables.block_size].long()
        kv = read(block_BN, key_pos_BN % tables.block_size)
        out_BQHD = _attend(q_THD[token_BQ], kv, visible_BQN, scale, softcap, sinks_H)
        out[token_BQ[real_BQ]] = out_BQHD[real_BQ].to(out.dtype)
    return out


def _attend(
    q_BQHD: Tensor, kv_BN2KD: Tensor, visible_BQN: Tensor, scale: float, softcap: float, sinks_H: Tensor | None
) -> Tensor:
    B, Q, H, D = q_BQHD.shape
    K = kv_BN2KD.shape[3]
    dtype = torch.promote_types(q_BQHD.dtype, torch.float32)
    k_BKND, v_BKND = kv_BN2KD.to(dtype).permute(2, 0, 3, 1, 4)
    q_BKXD = q_BQHD.to(dtype).view(B, Q, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)  # X = G * Q
    s_BHQN = (q_BKXD @ k_BKND.mT).mul_(scale).view(B, H, Q, -1)
    if softcap:
        s_BHQN = s_BHQN.div_(softcap).tanh_().mul_(softcap)
    s_BHQN.masked_fill_(~visible_BQN[:, None], -torch.inf)
    if sinks_H is None:
        p_BHQN = s_BHQN.softmax(-1)
    else:
        sink_BHQ1 = sinks_H.to(dtype)[None, :, None, None].expand(B, H, Q, 1)
        p_BHQN = torch.cat((s_BHQN, sink_BHQ1), -1).softmax(-1)[..., :-1]
    o_BKXD = p_BHQN.reshape(B, K, -1, k_BKND.shape[2]) @ v_BKND
    return o_BKXD.view(B, H, Q, D).transpose(1, 2)


def _tiles(tables: AttentionTables, window: int) -> Iterator[_Tile]:
    starts, context_lens = tables.query_starts.tolist(), tables.context_lens.tolist()
    rows = range(len(context_lens)) if tables.rows is None else tables.rows.tolist()
    for row, context_len in enumerate(context_lens):
        row_pos = context_len - (starts[row + 1] - starts[row])  # position of the row's first query
        for token in range(starts[row], starts[row + 1], MAX_TILE_QUERIES):
            pos = row_pos + token - starts[row]
            first_key = max(0, pos - window + 1) if window else 0
            num_queries = min(MAX_TILE_QUERIES, starts[row + 1] - token)
            yield _Tile(rows[row], token, num_queries, pos, first_key)


def _batches(tiles: Iterator[_Tile], num_heads: int) -> Iterator[tuple[list[_Tile], int, int]]:
    """(tiles, most queries, most keys) of tiles of like size: padding at most doubles either, and memory is bounded."""
    buckets: dict[tuple[int, int], list[_Tile]] = defaultdict(list)
    for tile in tiles:
        buckets[tile.num_queries.bit_length(), tile.num_keys.bit_length()].append(tile)
    for bucket in buckets.values():
        num_queries = max(tile.num_queries for tile in bucket)
        num_keys = max(tile.num_keys for tile in bucket)
        at_once = max(1, MAX_SCORES // (num_heads * num_queries * num_keys))
        for start in range(0, len(bucket), at_once):
            yield bucket[start : start + at_once], num_queries, num_keys
