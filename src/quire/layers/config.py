"""The fields of config.json that most decoders share; a model file adds its own and its family's defaults."""

from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModelError
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope

LAYER_TYPES = ("full_attention", "sliding_attention")


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
    rope_parameters: dict[str, Any] | None = None  # of each type of layers, where they differ
    sliding_window: int | None = None
    layer_types: list[str] | None = None  # of each layer, one of LAYER_TYPES
    sliding_window_pattern: int | None = None  # where there are no layer_types: every so-manyth layer sees everything
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def norm(self) -> RMSNorm:
        """Of the stream. Families with another make their own."""
        return RMSNorm(self.hidden_size, self.rms_norm_eps)

    def rope(self, rotary_share: float = 1.0, interleaved: bool = False) -> Rope:
        """One for all layers; `rotary_share` of each head rotates."""
        dim = int(self.head_size * rotary_share)
        return Rope(dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings, interleaved)

    def ropes(self, sliding_theta: float) -> dict[str, Rope]:
        """One for each type of layers; without `rope_parameters`, scaling is only for those that see everything."""
        flat = {
            "full_attention": {"rope_theta": self.rope_theta, **(self.rope_scaling or {})},
            "sliding_attention": {"rope_theta": sliding_theta},
        }
        nested, ropes = self.rope_parameters or {}, {}
        for kind in LAYER_TYPES:
            rope = {"rope_type": "default", **flat[kind], **(nested.get(kind) or {})}
            ropes[kind] = Rope(self.head_size, rope["rope_theta"], rope, self.max_position_embeddings)
        return ropes

    def layer_type(self, layer_idx: int) -> str:
        if self.layer_types is None:
            slides = self.sliding_window_pattern is not None and (layer_idx + 1) % self.sliding_window_pattern != 0
            return "sliding_attention" if slides else "full_attention"
        if self.layer_types[layer_idx] not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layers of type {self.layer_types[layer_idx]!r:.40} are not supported: {', '.join(LAYER_TYPES)} are"
            )
        return self.layer_types[layer_idx]

    def slides(self, layer_idx: int) -> bool:
        return self.layer_type(layer_idx) == "sliding_attention"

    def window(self, layer_idx: int) -> int | None:
        """Of layers whose type has one."""
        return self.sliding_window if self.slides(layer_idx) else None


@dataclass(frozen=True, kw_only=True)
class SwitchedWindowConfig(DecoderConfig):
    """Of families whose window is there but off, until `use_sliding_window` turns it on."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28  # how many layers, from the first, see everything, where there are no layer_types

    def window(self, layer_idx: int) -> int | None:
        slides = self.slides(layer_idx) if self.layer_types else layer_idx >= self.max_window_layers
        return self.sliding_window if self.use_sliding_window and slides else None
