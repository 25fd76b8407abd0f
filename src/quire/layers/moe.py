"""Mixture of experts: a router, the experts' weights in two tensors, and an MLP that every token goes through (shared).

Used by models; one whose shared MLP works in another way overrides `shared`. How experts are computed is up to their
backend (`layers/experts`).

Shape letters: T tokens, K experts of a token, E experts, D hidden size, F width of an expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import BadModelFileError, UnsupportedModelError
from quire.layers.base import Layer, Runtime, frozen
from quire.layers.config import DecoderConfig
from quire.layers.mlp import GatedMLP
from quire.ops.moe.reference import ACTIVATIONS
from quire.ops.routing.reference import Routing
from quire.quant.base import Part, Section, Split, Use, Weight, even

__all__ = ["BalancedExpertsConfig", "Experts", "MoE", "Routing", "SharedExpertsConfig"]


class Experts(Layer):
    """`names` are those in checkpoints. Three: gate, up and down of each expert, as in `{i}.gate_proj.weight`. Two:
    gate and up of all experts in one tensor [E, 2F, D], as in `gate_up_proj`, and down of all [E, D, F]. With `bias`,
    biases are at the same places, as `.bias` or `_bias`."""

    backend: ModuleType  # given by `attach`
    # Once loaded: a weight of each expert, as the backend takes it; plain ones are tensors [E, 2F, D] and [E, D, F].
    gate_up: Sequence[Any]
    down: Sequence[Any]

    def __init__(
        self, num_experts: int, hidden_size: int, expert_size: int, activation: str, bias: bool, names: tuple[str, ...]
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            supported = ", ".join(ACTIVATIONS)
            raise UnsupportedModelError(
                f"experts with the activation {activation!r:.40} are not supported: {supported} are"
            )
        self.activation = activation
        self.names = names
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.expert_size = expert_size
        self.gate_up_bias = frozen(torch.empty(num_experts, 2 * expert_size)) if bias else None
        self.down_bias = frozen(torch.empty(num_experts, hidden_size)) if bias else None

    def attach(self, runtime: Runtime, path: str) -> None:
        super().attach(runtime, path)
        self.backend = runtime.choose("experts")
        self.first_expert, self.num_own = 0, self.num_experts
        if not runtime.splits_experts:
            self.first_expert, end, _ = self._all_experts.share(self.group.rank, self.group.size)
            self.num_own = end - self.first_expert
        self._narrow_biases()
        for bias, parts in zip(("gate_up_bias", "down_bias"), self.parts()):
            self.keep(parts, Use.EXPERTS)
            if self.gate_up_bias is not None:
                self.biases[bias] = parts

    @property
    def _columns(self) -> Section:
        """Of one expert."""
        return even(self.expert_size, self.runtime.cut_block)

    @property
    def _all_experts(self) -> Section:
        return Section(self.num_experts, (self.num_experts,))

    def _narrow_biases(self) -> None:
        """To what this rank has of them."""
        if self.gate_up_bias is not None and self.down_bias is not None and self.group.size > 1:
            widths = 2 * self._columns.width(self.group.rank, self.group.size), self.hidden_size
            if not self.runtime.splits_experts:
                widths = 2 * self.expert_size, self.hidden_size
            self.gate_up_bias, self.down_bias = (
                frozen(torch.empty(self.num_own, width, device="meta")) for width in widths
            )

    def parts(self) -> tuple[list[Part], list[Part]]:
        """The parts of `gate_up`, an expert's gate before its up, and those of `down`."""
        E, D, F = self.num_experts, self.hidden_size, self.expert_size
        if len(self.names) == 2:
            gate_up, down = (f"{self.path}.{name}" for name in self.names)
            return (
                [Part(gate_up, (E, 2 * F, D), self._split("outputs", 2), end="")],
                [Part(down, (E, D, F), self._split("inputs", 1), end="")],
            )
        *gate_and_up, down = self.names
        gate_up_parts: list[Part] = []
        down_parts: list[Part] = []
        for i in range(E):
            split = self._split("outputs", 1, i)
            gate_up_parts.extend(Part(f"{self.path}.{i}.{name}", (F, D), split) for name in gate_and_up)
            down_parts.append(Part(f"{self.path}.{i}.{down}", (D, F), self._split("inputs", 1, i)))
        return gate_up_parts, down_parts

    def _split(self, axis: str, count: int, expert_idx: int | None = None) -> Split:
        """How a tensor is divided: by experts, or along an axis that has the width of an expert `count` times."""
        if self.runtime.splits_experts:
            return Split(axis, (self._columns,) * count)
        return Split("experts", (self._all_experts,), expert_idx)

    def loaded(self) -> None:
        self.gate_up, self.down = (method.experts(self.num_own) for method in self.methods)

    def forward(
        self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, added_TD: Tensor | None = None
    ) -> Tensor:
        """`added_TD`: what this rank adds to the sum of all ranks, which is returned."""
        if self.num_own < self.num_experts:
            expert_ids_TK = expert_ids_TK - self.first_expert
            is_own_TK = (expert_ids_TK >= 0) & (expert_ids_TK < self.num_own)
            # Experts of other ranks: any of its own, which then counts for nothing.
            expert_ids_TK = expert_ids_TK.where(is_own_TK, 0)
            weights_TK = weights_TK * is_own_TK
        # With a part of each expert, one rank adds the bias.
        adds_bias = self.group.rank == 0 or not self.runtime.splits_experts
        out_TD = self.backend.run(
            x_TD,
            weights_TK,
            expert_ids_TK,
            self.gate_up,
            self.down,
            activation=self.activation,
            gate_up_bias_E2F=self.gate_up_bias,
            down_bias_ED=self.down_bias if adds_bias else None,
            added_TD=added_TD,
        )
        return self.group.sum(out_TD)


class Router(Layer):
    """One row per expert. Never quantized: it is small, and which experts are chosen depends on it."""

    def __init__(self, hidden_size: int, num_experts: int, bias: bool) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(num_experts, hidden_size))
        self.bias = frozen(torch.empty(num_experts)) if bias else None


class MoE(Layer):
    """`bias`: the router and the experts have biases. `correction_bias`: the checkpoint's name of a bias that counts
    where experts are chosen, but not in their weights; it stays in float32. `shared`: an MLP that all tokens go through
    as well, `shared_experts` in checkpoints; its outputs are added up over ranks with those of the experts."""

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
        shared: GatedMLP | None = None,
    ) -> None:
        super().__init__()
        num_chosen = routing.num_experts_per_token
        num_in_kept_groups = num_experts // routing.num_groups * routing.num_groups_kept
        if num_chosen > num_in_kept_groups or num_experts % routing.num_groups:
            raise BadModelFileError(
                f"tokens cannot choose {num_chosen} of {num_experts} experts as the model's config.json says"
            )
        self.routing = routing
        self.correction_name = correction_bias
        self.gate = Router(hidden_size, num_experts, bias)
        self.correction_bias = frozen(torch.empty(num_experts)) if correction_bias else None
        self.experts = Experts(num_experts, hidden_size, expert_size, activation, bias, names)
        self.shared_experts = shared
        if shared is not None:
            shared.down_proj.sums = False

    def forward(self, x_TD: Tensor) -> Tensor:
        backend = self.experts.backend
        logits_TE = backend.router_logits(x_TD, self.gate.weight, self.gate.bias)
        weights_TK, expert_ids_TK = backend.route(logits_TE, self.routing, self.correction_bias)  # float32, int32
        return self.experts(x_TD, weights_TK, expert_ids_TK, self.shared(x_TD))

    def shared(self, x_TD: Tensor) -> Tensor | None:
        """What is added to the sum of the experts."""
        return None if self.shared_experts is None else self.shared_experts(x_TD)

    def weights(self) -> Iterator[Weight]:
        if self.correction_bias is not None:
            yield self.declare("correction_bias", self.correction_name, torch.float32)


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig(DecoderConfig):
    """For families whose layers, except the first ones, have routed experts, and shared ones that see every token."""

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int  # how many layers, from the first, have one MLP instead of experts

    def feed_forward(
        self, layer_idx: int, routing: Routing, *, bias: bool = False, correction_bias: str | None = None
    ) -> nn.Module:
        """The MLP or the experts of layer `layer_idx`. `bias`: MLPs have biases."""
        if layer_idx < self.first_k_dense_replace:
            return GatedMLP(self.hidden_size, self.intermediate_size, bias, self.hidden_act)
        shared_size = self.moe_intermediate_size * self.n_shared_experts
        return MoE(
            self.hidden_size,
            self.moe_intermediate_size,
            self.n_routed_experts,
            routing,
            activation=self.hidden_act,
            correction_bias=correction_bias,
            shared=GatedMLP(self.hidden_size, shared_size, bias, self.hidden_act),
        )


@dataclass(frozen=True, kw_only=True)
class BalancedExpertsConfig(SharedExpertsConfig):
    """Experts are chosen by sigmoid scores plus a bias that balances them, from the groups whose two best experts have
    the highest scores."""

    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def balanced(self, layer_idx: int) -> nn.Module:
        routing = Routing(
            self.num_experts_per_tok,
            "sigmoid",
            renormalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            num_groups=self.n_group,
            num_groups_kept=self.topk_group,
            group_score_size=2,
        )
        return self.feed_forward(layer_idx, routing, correction_bias="gate.e_score_correction_bias")
