"""MiniMax M2: q and k are normed over all heads together, part of each head rotates; experts are chosen by sigmoid
scores plus a bias."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.moe import MoE, Routing
from quire.layers.self_attention import JointNormAttention

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)

TINY = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_local_experts": 8, "num_experts_per_tok": 3,
    "rotary_dim": 16, "max_position_embeddings": 256, "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    max_position_embeddings: int = 196608
    rope_theta: float = 5000000.0
    partial_rotary_factor: float | None = None
    rotary_dim: int | None = None  # released checkpoints have this instead
    num_experts: int = 256
    num_experts_per_tok: int = 8

    @property
    def rotary_share(self) -> float:
        return self.partial_rotary_factor or (self.rotary_dim or self.head_dim) / self.head_dim


class MiniMaxM2(CausalLM):
    renames = (("block_sparse_moe.", "mlp."),)

    def __init__(self, config: Config) -> None:
        rope = config.rope(config.rotary_share)
        experts = partial(
            MoE,
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            Routing(config.num_experts_per_tok, "sigmoid", renormalize=True),
            activation=config.hidden_act,
            correction_bias="e_score_correction_bias",
            names=("w1", "w3", "w2"),
        )
        layers = [
            PreNormLayer(JointNormAttention(config, rope), experts(), config.norm)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = MiniMaxM2
