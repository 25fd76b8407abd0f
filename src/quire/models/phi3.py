"""Phi-3 and Phi-4: checkpoints hold q, k and v as one tensor, and gate and up as one; part of a head may rotate;
LongRoPE for long contexts."""

from dataclasses import dataclass
from typing import Any

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.rope import Rope
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Phi3ForCausalLM",)

TINY = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 1024, "original_max_position_embeddings": 192, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2, 2.5, 2.7, 3.0],
        "long_factor": [1.0, 1.2, 1.6, 2.1, 3.3, 5.0, 8.0, 13.0, 20.0, 31.0, 43.0, 60.0],
    },
    "sliding_window": 24,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096  # without LongRoPE
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 1.0

    def scaling(self) -> dict[str, Any] | None:
        if self.rope_scaling is None:
            return None
        first_names = {"su": "longrope", "yarn": "longrope"}  # what the first checkpoints call it
        name = self.rope_scaling["rope_type"]
        return {
            **self.rope_scaling,
            "rope_type": first_names.get(name, name),
            "original_max_position_embeddings": self.original_max_position_embeddings,
        }


class Phi3(CausalLM):
    def __init__(self, config: Config) -> None:
        rotary_dim = int(config.head_size * config.partial_rotary_factor)
        rope = Rope(rotary_dim, config.rope_theta, config.scaling(), config.max_position_embeddings)
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, window=config.sliding_window, fused=True),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act, fused=True),
                config.norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Phi3
