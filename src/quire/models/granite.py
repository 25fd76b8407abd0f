"""Granite 3 and dense Granite 4: Llama with multipliers on embeddings, attention scores and what layers add, and a
divisor of logits."""

from dataclasses import dataclass

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("GraniteForCausalLM",)

TINY = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22, "logits_scaling": 3.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # instead of 1 / sqrt(head size)
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class Granite(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, scale=config.attention_multiplier),
                GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
                config.norm,
                config.residual_multiplier,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(
            config,
            layers,
            config.norm(),
            embed_scale=config.embedding_multiplier,
            logit_scale=1 / config.logits_scaling,
        )


MODEL = Granite
