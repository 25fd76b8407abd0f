"""Llama 2 and 3, Mistral, SmolLM and the many models of the same shape."""

from dataclasses import dataclass

from quire.layers.config import DecoderConfig
from quire.layers.decoder import CausalLM, PreNormLayer
from quire.layers.mlp import GatedMLP
from quire.layers.self_attention import SelfAttention

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    mlp_bias: bool = False


class Llama(CausalLM):
    def __init__(self, config: Config) -> None:
        rope, bias = config.rope(), config.attention_bias
        layers = [
            PreNormLayer(
                SelfAttention(config, rope, bias=bias, out_bias=bias, window=config.sliding_window),
                GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
                config.norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers, config.norm())


MODEL = Llama
