"""Latent attention in plain torch: the oracle for the fast kernels, and the path where there is no Triton.

Called by `layers/mla.py`. The cache has one vector per token for all heads: the latent, of which keys and values are
made, then the rotated part of the key. Knows tensors and block tables; nothing of requests, schedulers or models.

Shape letters: T query tokens of the step, H heads, L latent size, R size of the rotated part, X = L + R; K inputs and N
outputs of a product.
"""

import torch
from torch import Tensor

from quire.ops.attention.reference import AttentionTables, attend_to
from quire.ops.elementwise.reference import rms_norm, rope
from quire.ops.rounding.reference import round_vectors


def write_latent(cache: Tensor, kv_TX: Tensor, slots_T: Tensor, latent_size: int, scales: Tensor | None = None) -> None:
    """Stores vectors in `cache` [blocks, block_size, X] at `slots_T` (block id * block size + offset).

    A negative slot is padding. With `scales` [blocks, block_size, 2] the cache holds codes, with a scale for the latent
    and one for the rotated part: `kv_TX` is rounded, here in place, too.
    """
    keep = slots_T >= 0
    blocks, offsets = slots_T[keep] // cache.shape[1], slots_T[keep] % cache.shape[1]
    first = 0
    for part, x in enumerate(kv_TX.split((latent_size, kv_TX.shape[1] - latent_size), 1)):
        codes = x
        if scales is not None:
            codes, scales_T = round_vectors(x, cache.dtype)
            x.copy_(codes.float() * scales_T[:, None])
            scales[blocks, offsets, part] = scales_T[keep]
        cache[blocks, offsets, first : first + x.shape[1]] = codes[keep].to(cache.dtype)
        first += x.shape[1]


def norm_rope_and_write(
    q_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions_T: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    interleaved: bool = False,
    scales: Tensor | None = None,
) -> None:
    """In place: the first L of `kv_TX` normed, its last R and all of `q_THR` rotated; then `kv_TX` into the cache."""
    c_TL, k_TR = kv_TX.split((len(norm_L), q_THR.shape[2]), 1)
    c_TL.copy_(rms_norm(c_TL, norm_L, eps)[0])
    rope(q_THR, k_TR[:, None], cos_sin, positions_T, interleaved)
    write_latent(cache, kv_TX, slots_T, len(norm_L), scales)


def head_linear(x_THK: Tensor, weight_HKN: Tensor, out: Tensor | None = None) -> Tensor:
    """Each head times its own matrix: [T, H, N]."""
    out = x_THK.new_empty(*x_THK.shape[:2], weight_HKN.shape[2]) if out is None else out
    torch.bmm(x_THK.transpose(0, 1), weight_HKN, out=out.transpose(0, 1))
    return out


def latent_attention(
    q_THL: Tensor,
    q_THR: Tensor,
    cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query, [q_THL | q_THR], over its row's cached vectors: [T, H, L].

    Keys are the whole vectors, values their first L. With `scales`, see `write_latent`, the cache holds codes. Query
    tokens past `query_starts[R]` are padding: their output is not written.
    """
    out = torch.empty(q_THL.shape, dtype=q_THL.dtype, device=q_THL.device) if out is None else out
    L, R = q_THL.shape[2], q_THR.shape[2]
    sizes = torch.tensor((L, R), device=cache.device)

    def read(block_BN: Tensor, offset_BN: Tensor) -> Tensor:
        """One key/value head, whose values are its keys."""
        vectors = cache[block_BN, offset_BN]
        if scales is not None:
            vectors = vectors.float() * scales[block_BN, offset_BN].repeat_interleave(sizes, 2, output_size=L + R)
        return vectors[:, :, None, None].expand(-1, -1, 2, -1, -1)

    padded = out.new_empty(*out.shape[:2], L + R)
    attend_to(read, torch.cat((q_THL, q_THR), 2), tables, scale, out=padded)
    num_tokens = int(tables.query_starts[-1])
    out[:num_tokens] = padded[:num_tokens, :, :L]
    return out
