"""GLM-4-9B and GLM-Edge: neighbours rotate together, in half of each head; q, k and v have biases; checkpoints hold gate and up as one."""

from dataclasses import dataclass

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("GlmForCausalLM",)

TINY = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 256,
    "rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False,
    "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


class Glm(CausalLM):
    def __init__(self, config: Config) -> None:
        rope = config.rope(config.partial_rotary_factor, interleaved=True)
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=config.attention_bias),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act, fused=True),
                config.norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Glm
