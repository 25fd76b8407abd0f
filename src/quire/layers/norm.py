"""Norms over a residual stream, with the add fused in: RMSNorm and LayerNorm, called alike.

`norm(x, residual)` returns (norm(x + residual), x + residual): what the block reads, and the stream it adds to. `then`
is the layer that alone reads it, and may want it rounded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.base import Layer, frozen
from quire.layers.linear import Linear
from quire.quant.base import Split


class RMSNorm(Layer):
    """`split`: how its weight is divided, where ranks divide what it norms."""

    def __init__(self, hidden_size: int, eps: float, split: Split | None = None) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(hidden_size))
        self.eps = eps
        self.splits = {} if split is None else {"weight": split}

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None = None, then: Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        rms_norm = self.kernels.rms_norm
        if then is not None:
            rms_norm = then.method.rms_norm(rms_norm, len(x_TD))
        return rms_norm(x_TD, self.weight, self.eps, residual_TD)


class LayerNorm(Layer):
    def __init__(self, hidden_size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(hidden_size))
        self.bias = frozen(torch.empty(hidden_size)) if bias else None
        self.eps = eps

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None = None, then: Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        residual_TD = x_TD if residual_TD is None else x_TD + residual_TD
        return functional.layer_norm(residual_TD, self.weight.shape, self.weight, self.bias, self.eps), residual_TD
