"""A checkpoint's tensors on their way into a model: small changes, such as another order of rows, and a rank's part.

Used by model files, in `translate`, and by the loader. Nothing is copied out of a file before `read`, so that a rank
copies its own part only, whatever was changed before it was cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.checkpoint.gguf import BLOCK
from quire.errors import UnsupportedModelError
from quire.quant.base import PLAIN, RawTensor, Weight

__all__ = ["CheckpointTensor", "RawTensor", "Weight", "order_q_k_v", "pick", "plain", "transposed", "unit_offset"]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


@dataclass(frozen=True)
class CheckpointTensor:
    """Describes a tensor of a checkpoint, or a part of it, in the model's order; `read` gets it."""

    type_name: str
    # A view of the file by any strides: numbers as words, [*shape], or packed ones in blocks of bytes,
    # [*shape[:-1], blocks in the last dimension, bytes of a block].
    units: Tensor
    order: tuple[int, Tensor] | None = None  # a dimension, and in which order its entries are read
    plus: float = 0.0  # added to all numbers

    @classmethod
    def of(cls, type_name: str, raw: Tensor, shape: tuple[int, ...]) -> "CheckpointTensor":
        """`raw`: its bytes, one after the other."""
        if type_name in BLOCK and type_name not in PLAIN:
            return cls(type_name, raw.view(*shape[:-1], -1, BLOCK[type_name][1]))
        num_bytes = raw.numel() // max(math.prod(shape), 1)
        # Several numbers in a byte: no method takes such a type.
        return cls(type_name, raw.view(WORDS[num_bytes]).view(shape) if num_bytes else raw)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.units.shape)
        return shape if self._block == 1 else (*shape[:-2], shape[-2] * self._block)

    @property
    def num_bytes(self) -> int:
        return self.units.nbytes

    @property
    def _block(self) -> int:
        """How many numbers are packed together."""
        return BLOCK.get(self.type_name, (1, 0))[0]

    def check_cut(self, pieces: Sequence[tuple[slice, ...]]) -> None:
        """Raises if pieces begin or end within a block of numbers that are packed together."""
        last = [piece[-1] for piece in pieces if piece and len(piece) == len(self.shape)]
        if any(piece.start % self._block or piece.stop % self._block for piece in last):
            raise UnsupportedModelError(f"blocks of {self._block}")

    def cut(self, pieces: Sequence[tuple[slice, ...]]) -> "CheckpointTensor":
        """Pieces of it (`Weight.pieces`), joined along the dimension in which they lie."""
        dim = max(map(len, pieces)) - 1
        if dim < 0:
            return self
        self.check_cut(pieces)
        bounds = [(piece[dim].start, piece[dim].stop) for piece in pieces]
        if self.order is not None and self.order[0] == dim:
            _, entries = self.order
            wanted = torch.cat([entries[start:stop] for start, stop in bounds])
            return pick(replace(self, order=None), wanted, dim)
        block = self._block if dim == len(self.shape) - 1 else 1
        parts = [self.units.narrow(dim, start // block, (stop - start) // block) for start, stop in bounds]
        return replace(self, units=parts[0] if len(parts) == 1 else torch.cat(parts, dim))

    def uploaded(self, upload: Callable[[Tensor], Tensor]) -> "CheckpointTensor":
        """On a GPU, in the file's order: there the model's order costs less. `upload` takes contiguous bytes."""
        dims = sorted(range(self.units.dim()), key=self.units.stride().__getitem__, reverse=True)
        in_file = self.units.permute(dims)
        raw = upload(in_file.contiguous().flatten().view(torch.uint8))
        back = [dims.index(dim) for dim in range(len(dims))]
        units = raw.view(self.units.dtype).view(in_file.shape).permute(back)
        order = None if self.order is None else (self.order[0], self.order[1].to(raw.device))
        return replace(self, units=units, order=order)

    def read(self) -> RawTensor:
        """Copied only if it does not lie in the file as it is wanted."""
        units = self.units if self.order is None else self.units.index_select(*self.order)
        tensor = RawTensor(self.type_name, units.contiguous().flatten().view(torch.uint8), self.shape)
        if not self.plus:
            return tensor
        return plain(tensor.dense(torch.float32, units.device) + self.plus).read()


def plain(values: Tensor) -> CheckpointTensor:
    """Values as a checkpoint would hold them."""
    names = {dtype: name for name, dtype in PLAIN.items()}
    raw = values.contiguous().flatten().view(torch.uint8)
    return CheckpointTensor.of(names[values.dtype], raw, tuple(values.shape))


def pick(tensor: CheckpointTensor, entries: Sequence[int] | Tensor, dim: int = 0) -> CheckpointTensor:
    """Entries of a dimension in another order, or some of them, each once; also of packed weights, not in the last."""
    entries = torch.as_tensor(entries)
    if not len(entries):
        return tensor
    first = int(entries.min())
    length = int(entries.max()) + 1 - first
    units = tensor.units.narrow(dim, first, length)
    if length > len(entries):  # only those that are wanted are copied
        return replace(tensor, units=units.index_select(dim, entries - first))
    return replace(tensor, units=units, order=(dim, entries - first))


def q_k_v_rows(num_heads: int, num_kv_heads: int, head_size: int) -> Tensor:
    """For `pick`: takes a fused projection, which has each KV head's queries, key and value together, to the order
    all of q, all of k, all of v."""
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_size).view(num_kv_heads, -1, head_size)
    return torch.cat((rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()))


def order_q_k_v(
    name: str, tensor: CheckpointTensor, num_heads: int, num_kv_heads: int, head_size: int
) -> CheckpointTensor:
    """A tensor of such a projection with its rows in our order; what belongs to the whole weight stays as it is."""
    rows = q_k_v_rows(num_heads, num_kv_heads, head_size)
    if tensor.shape[:1] == (len(rows),):
        return pick(tensor, rows)
    if math.prod(tensor.shape) == 1:
        return tensor
    raise UnsupportedModelError(
        f"{name}: heads of this model's fused projection are put in another order, which cannot be done with weights "
        "that this quantization does not keep row by row"
    )


def transposed(tensor: CheckpointTensor) -> CheckpointTensor:
    """Of numbers that are not packed; a vector stays as it is."""
    return tensor if len(tensor.shape) < 2 else replace(tensor, units=tensor.units.mT)


def unit_offset(tensor: CheckpointTensor) -> CheckpointTensor:
    """A norm's weight, which the checkpoint holds minus one."""
    return replace(tensor, plus=1.0)
