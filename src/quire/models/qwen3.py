"""Qwen3: each head of q and k is normed before it is rotated; some layers may see a window only."""

from dataclasses import dataclass

from quire.layers.config import SwitchedWindowConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Qwen3ForCausalLM",)

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 1000000.0, "use_sliding_window": True, "sliding_window": 24,
    "max_window_layers": 1,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(SwitchedWindowConfig):
    head_dim: int = 128
    max_position_embeddings: int = 32768


class Qwen3(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, qk_norm=True, window=config.window(layer_idx)),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Qwen3
