"""Linear layers: sizes and shards here, numbers in the quantization method that is attached to each.

Used by models. Must not know how weights are stored.
"""

import torch
from torch import Tensor, nn

from quire.layers.activation import activation
from quire.ops.ref import elementwise as reference
from quire.quant.base import LinearMethod


class Linear(nn.Module):
    """y = x W^T + b. Several out_features are shards of one fused product, stacked in order."""

    method: LinearMethod  # attached by worker/build.py

    def __init__(self, in_features: int, *out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.shard_sizes = out_features
        self.bias = nn.Parameter(torch.empty(sum(out_features)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(x, self.bias)


class GatedLinear(Linear):
    """act(gate) * up: both projections, and what is between them and the next one. SiLU has kernels of its own."""

    kernels = reference  # attached by worker/build.py

    def __init__(self, in_features: int, out_features: int, bias: bool = False, act: str = "silu") -> None:
        super().__init__(in_features, out_features, out_features, bias=bias)
        self.act = None if act == "silu" else activation(act)

    def forward(self, x: Tensor) -> Tensor:
        if self.act is None:
            return self.method.apply_silu_mul(x, self.bias, self.kernels.silu_mul)
        gate, up = self.method.apply(x, self.bias).chunk(2, -1)
        return self.act(gate) * up


class LMHead(Linear):
    """Hidden states to logits."""

    logits_dtype: torch.dtype | None = torch.float32  # attached by worker/build.py; None: the model's own

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(x, self.bias, self.logits_dtype)
