"""Mixtral: Mistral with a mixture of experts in every layer."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("MixtralForCausalLM",)

TINY = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 256, "rope_theta": 1000000.0, "sliding_window": 24,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    num_experts: int = 8
    num_experts_per_tok: int = 2


class Mixtral(CausalLM):
    renames = (("block_sparse_moe.", "mlp."),)

    def __init__(self, config: Config) -> None:
        rope = config.rope()
        experts = partial(
            MoE,
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, renormalize=True),
            activation=config.hidden_act,
            names=("w1", "w3", "w2"),
        )
        layers = [
            PreNormLayer(SelfAttention(config, rope, window=config.sliding_window), experts(), config.norm)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Mixtral
