"""How a checkpoint's tensors become a model's: the commonest shards, and small changes of order that families need.

Used by model files, in `translate`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.quant.base import PLAIN, RawTensor

__all__ = ["SHARDS", "RawTensor", "pick_rows", "plain", "transposed", "unit_offset"]

# checkpoint's module name -> (module here, shard of it)
SHARDS = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip


def plain(values: Tensor) -> RawTensor:
    """Numbers as a checkpoint would hold them."""
    names = {dtype: name for name, dtype in PLAIN.items()}
    return RawTensor(names[values.dtype], values.contiguous().flatten().view(torch.uint8), tuple(values.shape))


def pick_rows(tensor: RawTensor, rows: Sequence[int] | Tensor) -> RawTensor:
    """The tensor's rows in another order, or some of them; packed weights too: a row is a whole number of their blocks."""
    rows = torch.as_tensor(rows, device=tensor.raw.device)
    return RawTensor(tensor.type_name, tensor.raw.view(tensor.shape[0], -1)[rows].flatten(), (len(rows), *tensor.shape[1:]))


def transposed(tensor: RawTensor) -> RawTensor:
    return plain(tensor.dense(PLAIN.get(tensor.type_name, torch.float32), tensor.raw.device).T)


def unit_offset(tensor: RawTensor) -> RawTensor:
    """A norm's weight that a checkpoint holds minus one."""
    return plain(tensor.dense(torch.float32, tensor.raw.device) + 1)
