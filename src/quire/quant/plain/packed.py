"""Weights in the order that the compiled CPU kernels read, here as bfloat16; quant/kept/packed.py keeps codes likewise.

The same form serves a single row (read packed, at the speed of memory) and many rows (unpacked tile by tile on the way
to the matrix unit), so nothing is kept twice. Kernels read inputs in blocks of 32: a weight that does not consist of
these, as a rank's part may not, is a plain tensor.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.ops.packed_linear import cpu as linear
from quire.ops.packed_linear.reference import BLOCK
from quire.quant.base import PLAIN, Method, Part, RawTensor, runs_of
from quire.quant.plain.dense import Dense


class Packed(Method):
    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(parts, dtype, device)
        self.packed: dict[int, linear.PackedWeight] = {}  # by index of the part, until all are loaded
        self.pieces: list[linear.PackedWeight] = []  # the parts in order, neighbours of the same form joined
        self.wide_bias: Tensor | None = None  # in float32, as the kernels want it

    def load_part(self, part_idx: int, tensor: RawTensor) -> None:
        is_copied = PLAIN.get(tensor.type_name) != self.dtype  # else it is packed as it lies in the file
        values = tensor.dense(self.dtype) if is_copied else tensor.values()
        self.put(part_idx, linear.pack_dense(values.view(-1, values.shape[-1])))

    def put(self, part_idx: int, packed: linear.PackedWeight) -> None:
        self.packed[part_idx] = packed
        if len(self.packed) == len(self.parts):
            self.pieces = [linear.concat(run) for run in runs_of(self.packed, linear.joinable)]
            self.packed = {}

    def numbers(self) -> Tensor:
        return torch.cat([piece.dequantize() for piece in self.pieces]).to(self.dtype)

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        if bias is not None and self.wide_bias is None:
            self.wide_bias = bias.float()
        wide_bias = None if bias is None else self.wide_bias
        if len(self.pieces) == 1:
            return linear.linear(x, self.pieces[0], wide_bias, out_dtype or x.dtype)
        y = x.new_empty((len(x), sum(piece.n for piece in self.pieces)), dtype=out_dtype or x.dtype)
        start = 0
        for piece in self.pieces:
            end = start + piece.n
            linear.linear_into(y[:, start:end], x, piece, None if wide_bias is None else wide_bias[start:end])
            start = end
        return y

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        if bias is None and len(self.pieces) == 1:
            (piece,) = self.pieces
            if linear.gateable(piece):
                return linear.linear_silu_mul(x, piece)
        return super().apply_silu_mul(x, bias, silu_mul)

    def rows(
        self, ids: Tensor, lookup: Callable[[Tensor, Tensor, int | None], Tensor], first: int | None = None
    ) -> Tensor:
        (piece,) = self.pieces
        return linear.rows(ids, piece, first)

    def tensors(self) -> list[Tensor]:
        return [held for piece in self.pieces for held in piece.tensors]


class PackedExperts(Packed):
    """The weights of experts, each on its own: of an expert that has two parts, gate and up, these are joined."""

    def put(self, part_idx: int, packed: linear.PackedWeight) -> None:
        self.packed[part_idx] = packed

    def numbers(self) -> Tensor:
        pieces = self.pieces or [packed for _, packed in sorted(self.packed.items())]
        return torch.cat([piece.dequantize() for piece in pieces]).to(self.dtype)

    def experts(self, num_experts: int) -> list[list[linear.PackedWeight]]:
        """Of each expert the weights whose outputs make up its own: several, where they cannot be joined."""
        if len(self.parts) == 1:
            weights = [[weight] for weight in linear.split(self.packed.pop(0), num_experts)]
        else:
            weights = [self._joined(expert, len(self.parts) // num_experts) for expert in range(num_experts)]
        self.pieces = [piece for pieces in weights for piece in pieces]
        return weights

    def _joined(self, expert: int, num_parts: int) -> list[linear.PackedWeight]:
        parts = {i: self.packed.pop(expert * num_parts + i) for i in range(num_parts)}
        return [linear.concat(run) for run in runs_of(parts, linear.joinable)]


def has_whole_blocks(parts: Sequence[Part]) -> bool:
    """Whether this rank's inputs are what the kernels take."""
    return all(kept.shape[-1] % BLOCK == 0 for part in parts if (kept := part.kept()) is not None)


def METHOD(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Method:
    return (Packed if has_whole_blocks(parts) else Dense)(parts, dtype, device)


def EXPERTS(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Method:
    return (PackedExperts if has_whole_blocks(parts) else Dense)(parts, dtype, device)


why_not = linear.why_not
