"""The fields of config.json that most decoders share; a model file adds its own and its family's defaults."""

from dataclasses import dataclass
from typing import Any

from quire.layers.rope import Rope


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int | None
    num_key_value_heads: int | None = None  # None: one for each head
    head_dim: int | None = None  # None: heads share the hidden size
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None  # of each layer: full_attention, sliding_attention, …
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def rope(self, rotary_share: float = 1.0, interleaved: bool = False) -> Rope:
        """One for all layers; `rotary_share` of each head rotates."""
        dim = int(self.head_size * rotary_share)
        return Rope(dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings, interleaved)

    def slides(self, layer_idx: int) -> bool:
        return self.layer_types is not None and self.layer_types[layer_idx] == "sliding_attention"

    def window(self, layer_idx: int) -> int | None:
        """Of layers that `layer_types` says have one."""
        return self.sliding_window if self.slides(layer_idx) else None
