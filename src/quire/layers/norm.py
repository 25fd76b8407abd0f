"""Norms over a residual stream, the add fused in: RMSNorm and LayerNorm, called alike.

`norm(x, residual)` gives (norm(x + residual), x + residual): what the block reads, and the stream it will add to.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.ops.ref import elementwise as reference


class RMSNorm(nn.Module):
    kernels = reference  # attached by worker/build.py

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.kernels.rms_norm(x_TD, self.weight, self.eps, residual_TD)


class LayerNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual_TD = x_TD if residual_TD is None else x_TD + residual_TD
        return functional.layer_norm(residual_TD, self.weight.shape, self.weight, self.bias, self.eps), residual_TD
