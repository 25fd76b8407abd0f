"""Writes the native cache for tests, with the kernel that layers call."""

import torch
from torch import Tensor

from quire.ops.elementwise.cpu import rope_and_write


def write_kv(cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, scales: Tensor | None = None) -> None:
    """As `write_kv` of `ops/attention/reference.py`.

    It is `rope_and_write` without query heads, and with a rotation by zero, which leaves keys as they are.
    """
    num_tokens, _, head_size = k_TKD.shape
    cos_sin = torch.cat((torch.ones(1, head_size // 2), torch.zeros(1, head_size // 2)), 1)
    positions_T = torch.zeros(num_tokens, dtype=torch.int64)
    rope_and_write(k_TKD[:, :0], k_TKD, v_TKD, cos_sin, positions_T, cache, slots_T, scales=scales)
