"""Small changes that turn a checkpoint's tensors into a model's, such as another order of rows.

Used by model files, in `translate`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.quant.base import PLAIN, RawTensor, Weight

__all__ = ["RawTensor", "Weight", "order_q_k_v", "pick_rows", "plain", "transposed", "unit_offset"]


def plain(values: Tensor) -> RawTensor:
    """Values as a checkpoint would hold them."""
    names = {dtype: name for name, dtype in PLAIN.items()}
    return RawTensor(names[values.dtype], values.contiguous().flatten().view(torch.uint8), tuple(values.shape))


def pick_rows(tensor: RawTensor, rows: Sequence[int] | Tensor) -> RawTensor:
    """The tensor's rows in another order, or some of them; also of packed weights, whose rows are whole blocks."""
    rows = torch.as_tensor(rows, device=tensor.raw.device)
    picked = tensor.raw.view(tensor.shape[0], -1)[rows].flatten()
    return RawTensor(tensor.type_name, picked, (len(rows), *tensor.shape[1:]))


def q_k_v_rows(num_heads: int, num_kv_heads: int, head_size: int) -> Tensor:
    """For `pick_rows`: takes a fused projection, which has each KV head's queries, key and value together, to the order
    all of q, all of k, all of v."""
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_size).view(num_kv_heads, -1, head_size)
    return torch.cat((rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()))


def order_q_k_v(name: str, tensor: RawTensor, num_heads: int, num_kv_heads: int, head_size: int) -> RawTensor:
    """A tensor of such a projection with its rows in our order; what belongs to the whole weight stays as it is."""
    rows = q_k_v_rows(num_heads, num_kv_heads, head_size)
    if tensor.shape[:1] == (len(rows),):
        return pick_rows(tensor, rows)
    if math.prod(tensor.shape) == 1:
        return tensor
    raise UnsupportedModelError(
        f"{name}: heads of this model's fused projection are put in another order, which cannot be done with weights "
        "that this quantization does not keep row by row"
    )


def transposed(tensor: RawTensor) -> RawTensor:
    return plain(tensor.dense(PLAIN.get(tensor.type_name, torch.float32), tensor.raw.device).mT)


def unit_offset(tensor: RawTensor) -> RawTensor:
    """A norm's weight, which the checkpoint holds minus one."""
    return plain(tensor.dense(torch.float32, tensor.raw.device) + 1)
