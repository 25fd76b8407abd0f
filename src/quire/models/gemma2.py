"""Gemma 2: norms before and after each block, whose weights checkpoints hold minus one; attention scores and logits are
squashed to stay below a cap; every other layer sees a window."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, SandwichLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention
from quire.layers.weights import CheckpointTensor, unit_offset

ARCHITECTURES = ("Gemma2ForCausalLM",)

# Caps are low, so that scores and logits of random weights reach them.
TINY = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "max_position_embeddings": 256, "sliding_window": 24,
    "final_logit_softcapping": 8.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    head_dim: int = 256
    max_position_embeddings: int = 8192
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 2
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256  # scores are divided by its square root
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


class Gemma2(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        attention = partial(
            SelfAttention,
            config,
            rope,
            bias=bias,
            out_bias=bias,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        layers = [
            SandwichLayer(
                attention(window=config.window(layer_idx)),
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


MODEL = Gemma2
