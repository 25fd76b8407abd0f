"""The MLP of a layer: the gated one of Llama and most families since, and the plain one of earlier families."""

from torch import Tensor, nn

from quire.layers.activation import activation
from quire.layers.linear import GatedLinear, Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)). `fused`: checkpoints have gate and up in one tensor."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, act: str = "silu", fused: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, intermediate_size, bias, act, fused)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, split="inputs")

    @property
    def input_layer(self) -> Linear:
        """The layer that alone reads the inputs."""
        return self.gate_up_proj

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x_TD, then=self.down_proj))


class MLP(nn.Module):
    """down(act(up(x)))"""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = True, act: str = "gelu") -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, split="inputs")
        self.act = activation(act)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x_TD)))
