"""Weights in the compiled CPU kernels' own order: 4 or 8 bits as the GGUF file has them, else bfloat16.

One form serves a single row (read packed, at the speed of memory) and many (unpacked tile by tile on the way to the matrix
unit), so nothing is kept twice.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.cpu import linear
from quire.quant.base import LinearMethod, RawTensor


class Packed(LinearMethod):
    def __init__(
        self, in_features: int, shard_sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, keep_quantized: bool
    ) -> None:
        super().__init__(in_features, shard_sizes, dtype, device, keep_quantized)
        self.shards: list[linear.PackedWeight | None] = [None] * len(shard_sizes)
        self.pieces: list[linear.PackedWeight] = []  # the shards, neighbours of one form joined
        self.wide_bias: Tensor | None = None  # float32, as the kernels want it

    def load(self, shard_idx: int, tensor: RawTensor) -> None:
        rows, columns = tensor.shape
        if self.keep_quantized and linear.packable(tensor.type_name, rows, columns):
            self.shards[shard_idx] = linear.pack_gguf(tensor.type_name, tensor.raw, rows, columns)
        else:
            self.shards[shard_idx] = linear.pack_dense(tensor.dense(self.dtype))
        if all(shard is not None for shard in self.shards):
            self._join()

    def _join(self) -> None:
        runs: list[list[linear.PackedWeight]] = []
        for shard in self.shards:
            if runs and linear.joinable(runs[-1][-1], shard):
                runs[-1].append(shard)
            else:
                runs.append([shard])
        self.shards = [None] * len(self.shards)
        self.pieces = [linear.concat(run) for run in runs]

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        if bias is not None and self.wide_bias is None:
            self.wide_bias = bias.float()
        if len(self.pieces) == 1:
            return linear.linear(x, self.pieces[0], self.wide_bias, out_dtype or x.dtype)
        y = torch.cat([linear.linear(x, piece, None, out_dtype or x.dtype) for piece in self.pieces], -1)
        return y if bias is None else y + bias

    def apply_silu_mul(self, x: Tensor, bias: Tensor | None, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        if bias is None and len(self.pieces) == 1 and linear.gateable(self.pieces[0]):
            return linear.linear_silu_mul(x, self.pieces[0])
        return super().apply_silu_mul(x, bias, silu_mul)

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


METHOD = Packed
