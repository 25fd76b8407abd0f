"""A mixture's experts in plain torch, one expert after another: the oracle of `ops/moe/triton.py`, and what CPUs use.

Called by `layers/experts`. Knows tensors only; who goes where was decided by `route`.

Shape letters: T tokens, K experts of a token, A = T * K assignments, E experts, D hidden size, F width of an expert.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# The activation "clamped_swiglu" is (up + 1) * gate * sigmoid(ALPHA * gate), with gate <= LIMIT and -LIMIT <= up <=
# LIMIT.
ALPHA, LIMIT = 1.702, 7.0
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "clamped_swiglu")


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    gate_up_E2FD: Sequence[Any],
    down_EDF: Sequence[Any],
    *,
    activation: str = "silu",
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    added_TD: Tensor | None = None,
    multiply: Callable[[Tensor, Any, Tensor | None], Tensor] = functional.linear,
) -> Tensor:
    """The weighted sum of what each token's experts give for it, plus `added_TD`.

    The first F rows of an expert in `gate_up_E2FD` are its gate. `multiply`: for weights that are not plain.
    """
    num_experts, top_k = len(down_EDF), expert_ids_TK.shape[1]
    ids_A = expert_ids_TK.flatten().long()
    y_AD = x_TD.new_empty(len(ids_A), x_TD.shape[1])
    rows_of_experts = ids_A.argsort(stable=True).split(ids_A.bincount(minlength=num_experts).tolist())
    for expert, rows in enumerate(rows_of_experts):
        if len(rows):
            gate_up_bias = None if gate_up_bias_E2F is None else gate_up_bias_E2F[expert]
            down_bias = None if down_bias_ED is None else down_bias_ED[expert]
            gate_up = multiply(x_TD[rows // top_k], gate_up_E2FD[expert], gate_up_bias)
            y_AD[rows] = multiply(gated(gate_up, activation), down_EDF[expert], down_bias)
    out_TD = (y_AD.float().unflatten(0, (-1, top_k)) * weights_TK[..., None]).sum(1)
    return (out_TD if added_TD is None else out_TD + added_TD).to(x_TD.dtype)


def gated(x_A2F: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where a row is all of gate and then all of up; computed in float32, rounded once."""
    gate, up = x_A2F.float().chunk(2, -1)
    if activation == "silu":
        gate = functional.silu(gate)
    elif activation == "gelu_pytorch_tanh":
        gate = functional.gelu(gate, approximate="tanh")
    else:
        gate = gate.clamp(max=LIMIT)
        gate, up = gate * torch.sigmoid(ALPHA * gate), up.clamp(-LIMIT, LIMIT) + 1
    return (gate * up).to(x_A2F.dtype)
