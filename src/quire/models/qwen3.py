"""Qwen3: a Llama that norms each head of q and k before they are rotated; some of its layers may see a window only."""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.models import llama
from quire.models.llama import SHARDS

__all__ = ["ARCHITECTURES", "MODEL", "SHARDS", "TINY", "Config"]

ARCHITECTURES = ("Qwen3ForCausalLM",)

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Config(llama.Config):
    head_dim: int = 128
    max_position_embeddings: int = 32768
    sliding_window: int | None = 4096  # counts only where `use_sliding_window` says so
    use_sliding_window: bool = False
    max_window_layers: int = 28  # how many layers, from the first, see everything
    layer_types: list[str] | None = None  # of each layer; instead of the rule above

    def of_layer(self, layer_idx: int) -> "Config":
        """The config as one layer reads it: with the window it has, if any."""
        by_rule = "sliding_attention" if layer_idx >= self.max_window_layers else "full_attention"
        slides = (self.layer_types[layer_idx] if self.layer_types else by_rule) == "sliding_attention"
        return dataclasses.replace(self, sliding_window=self.sliding_window if self.use_sliding_window and slides else None)


class Qwen3Attention(llama.LlamaAttention):
    def __init__(self, config: Config, rope: Rope) -> None:
        super().__init__(config, rope)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x_TD), positions_T, self.q_norm, self.k_norm))


class Qwen3ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for layer_idx, layer in enumerate(self.model.layers):
            layer.self_attn = Qwen3Attention(config.of_layer(layer_idx), layer.self_attn.attn.rope)


MODEL = Qwen3ForCausalLM
