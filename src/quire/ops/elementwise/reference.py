"""Norm, gated activation and rotary embedding in plain torch: the oracle for the fused kernels and their fallback.

Called by `layers`. Knows tensors only; nothing of models, and of the cache only what `write_kv` takes.

Shape letters: T tokens, D width (or head size), F half of a gated projection, S rows picked, V vocabulary,
H query heads, K key/value heads.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.attention.reference import write_kv


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(the norm of the residual stream, the stream itself), after adding x to it.

    Without a residual, x is the stream.
    """
    residual_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide = residual_TD.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded before the product with the weight, as in Llama's reference: in bf16 the order changes results.
    return weight_D * normed.to(x_TD.dtype), residual_TD


def embedding(token_ids_T: Tensor, weight_VD: Tensor, first: int | None = None) -> Tensor:
    """The rows of the table that the ids name. `first`: the id of its first row, in a table that has only some of the
    rows; others are zero."""
    if first is None:
        return functional.embedding(token_ids_T, weight_VD)
    ids_T = token_ids_T - first
    is_here_T = (ids_T >= 0) & (ids_T < len(weight_VD))
    return functional.embedding(ids_T.where(is_here_T, 0), weight_VD) * is_here_T[:, None]


def gather_rows(x_TD: Tensor, idx_S: Tensor, out: Tensor | None = None) -> Tensor:
    """The rows of x that the indices name, [S, D]."""
    return torch.index_select(x_TD, 0, idx_S, out=out)


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """On its own where nothing follows in this process that could add: at the end of a pipeline's stage."""
    return x_TD + y_TD


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where a row is all of gate and then all of up."""
    gate, up = x_T2F.chunk(2, -1)
    return functional.silu(gate) * up


def rope(q_THD: Tensor, k_TKD: Tensor, cos_sin: Tensor, positions_T: Tensor, interleaved: bool = False) -> None:
    """Rotate, in place, the first rot_dim dims of each head. `cos_sin` is float32 [positions, rot_dim]: cos, then sin.

    A pair is (i, i + rot_dim/2), or (2i, 2i + 1) when `interleaved`. q and k may be views of one fused row.
    """
    cos, sin = cos_sin[positions_T][:, None].chunk(2, -1)
    for x in (q_THD, k_TKD):
        rotated = x[..., : cos_sin.shape[1]]
        halves = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
        x1, x2 = (half.float() for half in halves)
        # Both are computed before either is copied: in float32 x1 and x2 are views of what is written.
        turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        for half, new in zip(halves, turned, strict=True):
            half.copy_(new)


def rope_and_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    interleaved: bool = False,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
    fixed_scales: tuple[float, float] | None = None,
    key_center_KD: Tensor | None = None,
) -> None:
    """Each head of q and k normed if weights are given, then `rope`, in place; then k and v into the cache.

    k and v may have no heads: then nothing is written. `key_center_KD` (float32) is subtracted from k before that.
    """
    for x, weight_D in ((q_THD, q_norm_D), (k_TKD, k_norm_D)):
        if weight_D is not None:
            x.copy_(rms_norm(x, weight_D, eps)[0])
    rope(q_THD, k_TKD, cos_sin, positions_T, interleaved)
    if key_center_KD is not None:
        k_TKD -= key_center_KD
    if k_TKD.shape[1]:
        write_kv(cache, k_TKD, v_TKD, slots_T, scales, fixed_scales)
