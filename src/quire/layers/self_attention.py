"""Grouped-query attention as most decoders have it: projections around the attention over the cache."""

from typing import Any

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.layers.base import Layer, head_sections
from quire.layers.config import DecoderConfig
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope


class SelfAttention(Layer):
    """Sizes are the config's. `qk_norm`: an RMSNorm of each head of q and k before they are rotated. `rope` None:
    nothing is rotated. `fused`: checkpoints have q, k and v in one tensor."""

    def __init__(
        self,
        config: DecoderConfig,
        rope: Rope | None,
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_kv_heads
        head_size = config.head_size
        q, kv = head_sections(num_heads, num_kv_heads, head_size)
        parts = None if fused else ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = Linear(
            config.hidden_size, q.size, kv.size, kv.size, bias=bias, parts=parts, sections=(q, kv, kv)
        )
        self.o_proj = Linear(q.size, config.hidden_size, bias=out_bias, split="inputs", sections=(q,))
        self.q_norm = RMSNorm(head_size, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_size, config.rms_norm_eps) if qk_norm else None
        self.attn = Attention(
            num_heads, num_kv_heads, head_size, rope, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def loaded(self) -> None:
        if self.qkv_proj.bias is not None and self.k_norm is None:
            _, bias_X, _ = self.qkv_proj.bias.split(self.qkv_proj.out_features)
            self.attn.center_keys(bias_X.view(-1, self.attn.head_size))

    @property
    def input_layer(self) -> Linear:
        """The layer that alone reads the inputs."""
        return self.qkv_proj

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x_TD), positions_T, self.q_norm, self.k_norm))


class JointNormAttention(SelfAttention):
    """Norms all heads of q together, and all heads of k, before they are rotated. Takes SelfAttention's options."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(self, config: DecoderConfig, rope: Rope | None, **options: Any) -> None:
        super().__init__(config, rope, **options)
        q, k, _ = self.qkv_proj.sections
        self.q_norm = RMSNorm(q.size, config.rms_norm_eps, q)
        self.k_norm = RMSNorm(k.size, config.rms_norm_eps, k)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv(x_TD), positions_T))

    def qkv(self, x_TD: Tensor) -> Tensor:
        """What is rotated, cached and attended to: q, k and v side by side."""
        q_TX, k_TX, v_TX = self.qkv_proj(x_TD).split(self.qkv_proj.out_features, -1)
        return torch.cat((self.q_norm(q_TX)[0], self.k_norm(k_TX)[0], v_TX), -1)
