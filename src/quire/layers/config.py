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
    intermediate_size: int
    num_key_value_heads: int | None = None  # None: one for each head
    head_dim: int | None = None  # None: heads share the hidden size
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # by type of layer, where they differ
    sliding_window: int | None = None
    layer_types: list[str] | None = None  # of each layer, one of LAYER_TYPES
    sliding_window_pattern: int | None = None  # n, without layer_types: every n-th layer sees the whole context
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """The part of a head that may be rotated: here the whole head."""
        return self.head_size

    def norm(self) -> RMSNorm:
        """Makes a norm of the residual stream. Families with another kind of norm make their own."""
        return RMSNorm(self.hidden_size, self.rms_norm_eps)

    def rope(self, rotary_share: float = 1.0, interleaved: bool = False) -> Rope:
        """One for all layers; `rotary_share` of `rotary_size` is rotated."""
        dim = int(self.rotary_size * rotary_share)
        return Rope(dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings, interleaved)

    def ropes(self, sliding_theta: float) -> dict[str, Rope]:
        """One for each type of layer. Without `rope_parameters`, only layers that see the whole context are scaled."""
        flat: dict[str, dict[str, Any]] = {
            "full_attention": {"rope_theta": self.rope_theta, **(self.rope_scaling or {})},
            "sliding_attention": {"rope_theta": sliding_theta},
        }
        nested = self.rope_parameters or {}
        ropes = {}
        for layer_type in LAYER_TYPES:
            scaling = {"rope_type": "default", **flat[layer_type], **(nested.get(layer_type) or {})}
            ropes[layer_type] = Rope(self.head_size, scaling["rope_theta"], scaling, self.max_position_embeddings)
        return ropes

    def layer_type(self, layer_idx: int) -> str:
        if self.layer_types is None:
            slides = self.sliding_window_pattern is not None and (layer_idx + 1) % self.sliding_window_pattern != 0
            return "sliding_attention" if slides else "full_attention"
        layer_type = self.layer_types[layer_idx]
        if layer_type not in LAYER_TYPES:
            supported = ", ".join(LAYER_TYPES)
            raise UnsupportedModelError(f"layers of type {layer_type!r:.40} are not supported: {supported} are")
        return layer_type

    def slides(self, layer_idx: int) -> bool:
        return self.layer_type(layer_idx) == "sliding_attention"

    def window(self, layer_idx: int) -> int | None:
        """How many tokens the layer sees; None: the whole context."""
        return self.sliding_window if self.slides(layer_idx) else None


@dataclass(frozen=True, kw_only=True)
class SwitchedWindowConfig(DecoderConfig):
    """For families whose `sliding_window` counts only if `use_sliding_window` is set."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28  # without layer_types: so many layers, from the first, see the whole context

    def window(self, layer_idx: int) -> int | None:
        slides = self.slides(layer_idx) if self.layer_types else layer_idx >= self.max_window_layers
        return self.sliding_window if self.use_sliding_window and slides else None
