"""Phi-1 to Phi-2: attention and MLP read one norm and are added together; part of a head rotates; biases everywhere,
also on logits."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, ParallelLayer
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.layers.rope import Rope
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("PhiForCausalLM",)

TINY = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    qk_layernorm: bool = False


class NormedHeads(SelfAttention):
    """Each head of q and k goes through a LayerNorm before it is rotated."""

    def __init__(self, config: Config, rope: Rope, **options: bool) -> None:
        super().__init__(config, rope, **options)
        self.q_layernorm = LayerNorm(config.head_size, config.layer_norm_eps)
        self.k_layernorm = LayerNorm(config.head_size, config.layer_norm_eps)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        num_heads, num_kv_heads = self.attn.num_heads, self.attn.num_kv_heads
        heads_THD = self.qkv_proj(x_TD).unflatten(-1, (-1, self.attn.head_size))
        q_THD, k_TKD, v_TKD = heads_THD.split((num_heads, num_kv_heads, num_kv_heads), 1)
        normed_THD = torch.cat((self.q_layernorm(q_THD)[0], self.k_layernorm(k_TKD)[0], v_TKD), 1)
        return self.o_proj(self.attn(normed_THD.flatten(1), positions_T))


class Phi(CausalLM):
    renames = (
        ("self_attn.dense.", "self_attn.o_proj."),
        ("mlp.fc1.", "mlp.up_proj."),
        ("mlp.fc2.", "mlp.down_proj."),
        ("model.final_layernorm.", "model.norm."),
    )

    def __init__(self, config: Config) -> None:
        norm = partial(LayerNorm, config.hidden_size, config.layer_norm_eps)
        rope = config.rope(config.partial_rotary_factor)
        attention = NormedHeads if config.qk_layernorm else SelfAttention
        layers = [
            ParallelLayer(
                attention(config, rope, bias=True, out_bias=True),
                MLP(config.hidden_size, config.intermediate_size, act=config.hidden_act),
                norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, norm(), head_bias=True)


MODEL = Phi
