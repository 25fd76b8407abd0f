"""How a checkpoint's tensors become a model's: the commonest shards, and small changes of order that families need.

Used by model files, in `translate`, and by worker/load.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.errors import BadModelFileError
from quire.ops.ref import mxfp4
from quire.quant.base import PLAIN, RawTensor

__all__ = ["QKV_SHARDS", "SHARDS", "RawTensor", "Taker", "from_mxfp4", "pick_rows", "plain", "q_k_v_rows", "transposed", "unit_offset"]

# Expected shape, and what to do with the tensor. A module with tensors of its own kind gives these by name (`takers`); see worker/load.py.
Taker = tuple[tuple[int, ...], Callable[[RawTensor], None]]

# checkpoint's module name -> (module here, shard of it)
QKV_SHARDS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
SHARDS = {**QKV_SHARDS, "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def plain(values: Tensor) -> RawTensor:
    """Numbers as a checkpoint would hold them."""
    names = {dtype: name for name, dtype in PLAIN.items()}
    return RawTensor(names[values.dtype], values.contiguous().flatten().view(torch.uint8), tuple(values.shape))


def pick_rows(tensor: RawTensor, rows: Sequence[int] | Tensor) -> RawTensor:
    """The tensor's rows in another order, or some of them; packed weights too: a row is a whole number of their blocks."""
    rows = torch.as_tensor(rows, device=tensor.raw.device)
    return RawTensor(tensor.type_name, tensor.raw.view(tensor.shape[0], -1)[rows].flatten(), (len(rows), *tensor.shape[1:]))


def q_k_v_rows(num_heads: int, num_kv_heads: int, head_size: int) -> Tensor:
    """For `pick_rows`, of a fused projection that has each KV head's queries, key and value together: all of q, of k, of v."""
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_size).view(num_kv_heads, -1, head_size)
    return torch.cat((rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()))


def transposed(tensor: RawTensor) -> RawTensor:
    return plain(tensor.dense(PLAIN.get(tensor.type_name, torch.float32), tensor.raw.device).mT)


def unit_offset(tensor: RawTensor) -> RawTensor:
    """A norm's weight that a checkpoint holds minus one."""
    return plain(tensor.dense(torch.float32, tensor.raw.device) + 1)


def from_mxfp4(blocks: RawTensor, scales: RawTensor) -> RawTensor:
    """The numbers of experts [E, rows, columns], which a checkpoint holds in two tensors."""
    if blocks.shape != (*scales.shape, 16) or len(scales.shape) != 3:
        raise BadModelFileError(f"MXFP4 blocks have shape {list(blocks.shape)}, their scales {list(scales.shape)}: they do not match")
    return plain(mxfp4.dequantize(blocks.raw.view(blocks.shape), scales.raw.view(scales.shape)))
