"""Gemma 3, text: Gemma 2's norms, and a norm of each head of q and k instead of caps; five layers of six see a window,
and rotate with another theta than those that see the whole context."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, SandwichLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor, unit_offset

ARCHITECTURES = ("Gemma3ForCausalLM",)

TINY = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 24,
    "max_position_embeddings": 256, "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0  # the theta of layers with a window, where there are no rope_parameters
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256  # scores are divided by its square root
    final_logit_softcapping: float | None = None


class Gemma3(CausalLM):
    def __init__(self, config: Config) -> None:
        ropes, bias = config.ropes(sliding_theta=config.rope_local_base_freq), config.attention_bias
        scale = config.query_pre_attn_scalar**-0.5
        attention = partial(SelfAttention, config, bias=bias, out_bias=bias, qk_norm=True, scale=scale)
        layers = [
            SandwichLayer(
                attention(rope=ropes[config.layer_type(layer_idx)], window=config.window(layer_idx)),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_activation),
                config.norm,
            )
            for layer_idx in range(config.num_hidden_layers)
        ]
        super().__init__(
            config,
            layers,
            config.norm(),
            embed_scale=config.hidden_size**0.5,
            logit_softcap=config.final_logit_softcapping,
        )

    def translate(self, name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, CheckpointTensor]]:
        yield from super().translate(name, unit_offset(tensor) if name.endswith("norm.weight") else tensor)


MODEL = Gemma3
