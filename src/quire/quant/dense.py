"""Weights as plain tensors in the model's dtype, multiplied by torch: right everywhere, and the only way in float32."""

import torch
from torch import Tensor
from torch.nn import functional

from quire.quant.base import LinearMethod, RawTensor


class Dense(LinearMethod):
    weight: Tensor | None = None

    def load(self, shard_idx: int, tensor: RawTensor) -> None:
        if len(self.shard_sizes) == 1:
            self.weight = tensor.dense(self.dtype, self.device)
            return
        if self.weight is None:
            self.weight = torch.empty(sum(self.shard_sizes), self.in_features, dtype=self.dtype, device=self.device)
        start = sum(self.shard_sizes[:shard_idx])
        self.weight[start : start + self.shard_sizes[shard_idx]] = tensor.dense(self.dtype, self.device)

    def tie(self, weight: Tensor) -> bool:
        self.weight = weight
        return True

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        y = functional.linear(x, self.weight, bias)
        return y if out_dtype is None else y.to(out_dtype)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


METHOD = Dense
