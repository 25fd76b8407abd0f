"""OLMo 3: OLMo 2 (norms after attention and MLP, and over all heads of q and of k) with a window in three layers of
four; only the fourth scales its RoPE."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PostNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import JointNormAttention

ARCHITECTURES = ("Olmo3ForCausalLM",)

TINY = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "sliding_window": 24, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.14,
        "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4


class Olmo3(CausalLM):
    def __init__(self, config: Config) -> None:
        ropes, bias = config.ropes(sliding_theta=config.rope_theta), config.attention_bias
        attention = partial(JointNormAttention, config, bias=bias, out_bias=bias)
        layers = [
            PostNormLayer(
                attention(rope=ropes[config.layer_type(layer_idx)], window=config.window(layer_idx)),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Olmo3
