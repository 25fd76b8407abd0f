"""Cohere's Command R7B and Command A: attention and MLP read the same LayerNorm and are added together; three layers of
four see a window and rotate neighbouring elements, the fourth sees the whole context and has no positions."""

from dataclasses import dataclass
from functools import partial

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, ParallelLayer
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("Cohere2ForCausalLM",)

TINY = {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "sliding_window": 24, "rope_theta": 50000.0,
    "logit_scale": 0.25,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625


class Cohere2(CausalLM):
    def __init__(self, config: Config) -> None:
        norm = partial(LayerNorm, config.hidden_size, config.layer_norm_eps, bias=False)
        rope, bias = config.rope(interleaved=True), config.attention_bias
        layers = [
            ParallelLayer(
                SelfAttention(config, rope if window else None, bias=bias, out_bias=bias, window=window),
                GatedMLP(config.hidden_size, config.intermediate_size, act=config.hidden_act),
                norm,
            )
            for window in map(config.window, range(config.num_hidden_layers))
        ]
        super().__init__(config, layers, norm(), logit_scale=config.logit_scale)


MODEL = Cohere2
