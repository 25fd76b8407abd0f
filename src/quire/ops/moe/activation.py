"""Gated activations in Triton, for kernels that end with one; twin of those of experts: `gated` of `reference.py`."""

import torch
import triton
import triton.language as tl

from quire.ops.moe import reference as twin

ALPHA, LIMIT = tl.constexpr(twin.ALPHA), tl.constexpr(twin.LIMIT)


def linear_activation(dtype: torch.dtype) -> str:
    """The activation of a linear gated layer: silu, rounded at the same points as by two operations of that dtype."""
    return "rounded silu" if dtype == torch.bfloat16 else "silu"


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, in float32."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "rounded silu":
        gate = gate.to(tl.bfloat16).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(tl.bfloat16)
        return gate.to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)
    elif ACTIVATION == "gelu_pytorch_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        return gate * tl.sigmoid(2.0 * inner) * up  # (1 + tanh(x)) / 2 is sigmoid(2 x)
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        gate = tl.minimum(gate, LIMIT)
        return gate * tl.sigmoid(gate * ALPHA) * (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0)
