"""Norms over a residual stream, with the add fused in: RMSNorm and LayerNorm, called alike.

`norm(x, residual)` returns (norm(x + residual), x + residual): what the block reads, and the stream it adds to. `then`
is the layer that alone reads it, and may want it rounded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.base import Layer, frozen
from quire.layers.linear import Linear
from quire.quant.base import Section, Split


class RMSNorm(Layer):
    """`section`: how its weight is divided, where ranks divide what it norms."""

    def __init__(self, hidden_size: int, eps: float, section: Section | None = None) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(hidden_size))
        self.hidden_size = hidden_size
        self.eps = eps
        self.section = section
        self.splits = {} if section is None else {"weight": Split("outputs", (section,))}

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None = None, then: Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.section is not None and self.group.size > 1:
            return self._divided(x_TD, self.section), x_TD
        rms_norm = self.kernels.rms_norm
        if then is not None:
            rms_norm = then.method.rms_norm(rms_norm)
        return rms_norm(x_TD, self.weight, self.eps, residual_TD)

    def _divided(self, x_TX: Tensor, section: Section) -> Tensor:
        """Of a vector of which ranks have parts. One of the ranks that have the same part adds its squares."""
        squares_T1 = x_TX.float().square().sum(-1, keepdim=True)
        if section.num_sharing(self.group.rank, self.group.size):
            squares_T1.zero_()
        mean_T1 = self.group.sum(squares_T1) / self.hidden_size
        return self.weight * (x_TX.float() * torch.rsqrt(mean_T1 + self.eps)).to(x_TX.dtype)


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
