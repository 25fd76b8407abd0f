"""Mixture of experts: a router, the experts' weights in two tensors, and what every token goes through besides.

Used by models; one that routes or shares in its own way overrides `route` or `shared`. Must not know how experts are computed: their
backend is attached by `worker/build.py`.

Shape letters: T tokens, K experts of a token, E experts, D hidden size, F width of an expert.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.experts import torch as reference
from quire.layers.mlp import GatedMLP
from quire.layers.weights import RawTensor, Taker
from quire.ops.ref.moe import ACTIVATIONS
from quire.ops.ref.routing import Routing

__all__ = ["BalancedExpertsConfig", "Experts", "MoE", "Routing", "SharedExpertsConfig"]


class Experts(nn.Module):
    """`names` are the checkpoint's: of gate, up and down of each expert, `{i}.gate_proj.weight`; or, if two, of all experts' gate and
    up in one tensor [E, 2F, D] and their down [E, D, F], `gate_up_proj`. With `bias`, `.bias` or `_bias` in the same places."""

    backend: ModuleType = reference  # attached by worker/build.py

    def __init__(self, num_experts: int, hidden_size: int, expert_size: int, activation: str, bias: bool, names: tuple[str, ...]) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"experts with the activation {activation!r:.40} are not supported: {', '.join(ACTIVATIONS)} are")
        E, D, F = num_experts, hidden_size, expert_size
        self.activation, self.names, self.expert_size = activation, names, F
        self.gate_up = nn.Parameter(torch.empty(E, 2 * F, D), requires_grad=False)
        self.down = nn.Parameter(torch.empty(E, D, F), requires_grad=False)
        self.gate_up_bias = nn.Parameter(torch.empty(E, 2 * F), requires_grad=False) if bias else None
        self.down_bias = nn.Parameter(torch.empty(E, D), requires_grad=False) if bias else None

    def forward(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, added_TD: Tensor | None = None) -> Tensor:
        return self.backend.run(
            x_TD, weights_TK, expert_ids_TK, self.gate_up, self.down, activation=self.activation,
            gate_up_bias_E2F=self.gate_up_bias, down_bias_ED=self.down_bias, added_TD=added_TD,
        )  # fmt: skip

    def takers(self, path: str, dtype: torch.dtype, device: torch.device) -> dict[str, Taker]:
        """What this module wants of a checkpoint, by name. Memory is taken when the first tensor of a kind comes."""
        takers: dict[str, Taker] = {}

        def want(name: str, shape: tuple[int, ...], parameter: str, *index: int | slice) -> None:
            takers[f"{path}.{name}"] = shape, lambda tensor: self._put(parameter, index, tensor.dense(dtype, device))

        for kind in ("",) if self.gate_up_bias is None else ("", "_bias"):
            gate_up, down = f"gate_up{kind}", f"down{kind}"
            (num_experts, _, *inputs), down_shape = getattr(self, gate_up).shape, tuple(getattr(self, down).shape)
            if len(self.names) == 2:
                want(f"{self.names[0]}{kind}", (num_experts, 2 * self.expert_size, *inputs), gate_up)
                want(f"{self.names[1]}{kind}", down_shape, down)
                continue
            gate_name, up_name, down_name = (f"{name}.{kind.strip('_') or 'weight'}" for name in self.names)
            for i in range(num_experts):
                want(f"{i}.{gate_name}", (self.expert_size, *inputs), gate_up, i, slice(0, self.expert_size))
                want(f"{i}.{up_name}", (self.expert_size, *inputs), gate_up, i, slice(self.expert_size, None))
                want(f"{i}.{down_name}", down_shape[1:], down, i)
        return takers

    def _put(self, name: str, index: tuple[int | slice, ...], values: Tensor) -> None:
        parameter = getattr(self, name)
        if values.shape == parameter.shape:
            setattr(self, name, nn.Parameter(values, requires_grad=False))  # all of it: no second copy
            return
        if parameter.is_meta:
            parameter = nn.Parameter(torch.empty(parameter.shape, dtype=values.dtype, device=values.device), requires_grad=False)
            setattr(self, name, parameter)
        parameter[index] = values


class Router(nn.Module):
    """One row per expert; never quantized: it is small, and who is chosen hangs on it."""

    def __init__(self, hidden_size: int, num_experts: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_experts), requires_grad=False) if bias else None


class MoE(nn.Module):
    """`bias` is the router's and the experts' alike. `correction_bias` names one in the checkpoint that chooses experts but does not
    weigh them; it stays in float32. `shared`: what all tokens go through as well, `shared_experts` in checkpoints."""

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        routing: Routing,
        *,
        activation: str = "silu",
        bias: bool = False,
        correction_bias: str | None = None,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if routing.num_experts_per_token > num_experts // routing.num_groups * routing.num_groups_kept or num_experts % routing.num_groups:
            raise BadModelFileError(f"tokens cannot choose {routing.num_experts_per_token} of {num_experts} experts as the model's config.json says")
        self.routing, self.correction_name = routing, correction_bias
        self.gate = Router(hidden_size, num_experts, bias)
        self.correction_bias = nn.Parameter(torch.empty(num_experts), requires_grad=False) if correction_bias else None
        self.experts = Experts(num_experts, hidden_size, expert_size, activation, bias, names)
        self.shared_experts = shared

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, expert_ids_TK = self.route(x_TD)
        return self.experts(x_TD, weights_TK, expert_ids_TK, self.shared(x_TD))

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(weights_TK float32, expert_ids_TK int32)."""
        backend = self.experts.backend
        return backend.route(backend.router_logits(x_TD, self.gate.weight, self.gate.bias), self.routing, self.correction_bias)

    def shared(self, x_TD: Tensor) -> Tensor | None:
        """What is added to the experts' sum."""
        return None if self.shared_experts is None else self.shared_experts(x_TD)

    def takers(self, path: str, dtype: torch.dtype, device: torch.device) -> dict[str, Taker]:
        """Its own only: not the router's nor the experts'."""

        def take(tensor: RawTensor) -> None:
            self.correction_bias = nn.Parameter(tensor.dense(torch.float32, device), requires_grad=False)

        return {f"{path}.{self.correction_name}": (tuple(self.correction_bias.shape), take)} if self.correction_name else {}


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """Beside a DecoderConfig: of families whose layers, but for the first ones, have experts of which some see every token."""

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int  # so many layers have one MLP instead of experts

    def feed_forward(self, layer_idx: int, routing: Routing, *, bias: bool = False, correction_bias: str | None = None) -> nn.Module:
        """What layer `layer_idx` has behind its attention; `bias` is the MLPs'."""
        if layer_idx < self.first_k_dense_replace:
            return GatedMLP(self.hidden_size, self.intermediate_size, bias, self.hidden_act)
        size = self.moe_intermediate_size
        return MoE(
            self.hidden_size, size, self.n_routed_experts, routing, activation=self.hidden_act, correction_bias=correction_bias,
            shared=GatedMLP(self.hidden_size, size * self.n_shared_experts, bias, self.hidden_act),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BalancedExpertsConfig(SharedExpertsConfig):
    """Experts are chosen by sigmoid scores plus a bias that balances them, in the groups whose two best are the best."""

    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def balanced(self, layer_idx: int) -> nn.Module:
        routing = Routing(
            self.num_experts_per_tok, "sigmoid", self.norm_topk_prob, self.routed_scaling_factor, self.n_group, self.topk_group,
            group_score_size=2,
        )  # fmt: skip
        return self.feed_forward(layer_idx, routing, correction_bias="gate.e_score_correction_bias")
