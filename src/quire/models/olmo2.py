"""OLMo 2: norms after attention and MLP instead of before them; q and k are normed too, over all heads together."""

from dataclasses import dataclass

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PostNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import JointNormAttention

ARCHITECTURES = ("Olmo2ForCausalLM",)

TINY = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 500000.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    rms_norm_eps: float = 1e-5


class Olmo2(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        layers = [
            PostNormLayer(
                JointNormAttention(config, rope, bias=bias, out_bias=bias),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act),
                config.norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Olmo2
