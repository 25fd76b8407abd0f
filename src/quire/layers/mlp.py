"""The gated MLP of Llama and most families since: down(silu(gate(x)) * up(x))."""

from torch import Tensor, nn

from quire.layers.linear import GatedLinear, Linear


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x_TD))
