"""GLM-4-9B and GLM-Edge: half of each head rotates, neighbouring elements together; q, k and v have biases; checkpoints
hold gate and up as one tensor. GLM-4-0414 and GLM-Z1 (Glm4) have norms after attention and MLP too, by other names."""

from dataclasses import dataclass

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer, SandwichLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")

TINY = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7, "attention_bias": True, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architectures: list[str]
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


class Glm(CausalLM):
    def __init__(self, config: Config) -> None:
        is_glm4 = "Glm4ForCausalLM" in config.architectures
        layer = SandwichLayer if is_glm4 else PreNormLayer
        rope = config.rope(config.partial_rotary_factor, interleaved=True)
        layers = [
            layer(
                SelfAttention(config, rope, bias=config.attention_bias),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act, fused=True),
                config.norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())
        if is_glm4:
            # In this order: what they call post_attention is the norm before the MLP.
            self.renames = (
                ("post_attention_layernorm", "pre_feedforward_layernorm"),
                ("post_self_attn_layernorm", "post_attention_layernorm"),
                ("post_mlp_layernorm", "post_feedforward_layernorm"),
            )


MODEL = Glm
