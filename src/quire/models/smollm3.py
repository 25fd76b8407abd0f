"""SmolLM3: every fourth layer, or those that the config names, has no positions (NoPE)."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("SmolLM3ForCausalLM",)

TINY = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 5000000.0, "no_rope_layer_interval": 2,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    max_position_embeddings: int = 32768
    rope_theta: float = 2000000.0
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None  # of each layer: 1 if it rotates, in spite of the name
    no_rope_layer_interval: int = 4  # n, without such a list: every n-th layer does not rotate
    mlp_bias: bool = False
    tie_word_embeddings: bool = True

    def rotates(self, layer_idx: int) -> bool:
        if self.no_rope_layers:
            return bool(self.no_rope_layers[layer_idx])
        return (layer_idx + 1) % self.no_rope_layer_interval != 0

    def window(self, layer_idx: int) -> int | None:
        slides = self.slides(layer_idx) if self.layer_types else not self.rotates(layer_idx)
        return self.sliding_window if self.use_sliding_window and slides else None


class SmolLM3(CausalLM):
    def __init__(self, config: Config) -> None:
        bias = config.attention_bias
        attention = partial(SelfAttention, config, bias=bias, out_bias=bias)
        rope = config.rope()
        layers = [
            PreNormLayer(
                attention(rope=rope if config.rotates(layer_idx) else None, window=config.window(layer_idx)),
                GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = SmolLM3
